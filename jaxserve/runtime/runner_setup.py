"""The decisions that come before a runner allocates memory: buckets, layer caches, step functions, memory plan.

Makes the program set that follows from them. Allocates nothing; `plan` may compile programs to measure their memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.models.loading.loader import LoadedModel
from jaxserve.ops.paged_attention import Backend, get_backend
from jaxserve.runtime import kv_cache, memory
from jaxserve.runtime.compilation.buckets import Buckets, make_buckets
from jaxserve.runtime.compilation.compiler import compile_all, compiler_options
from jaxserve.runtime.fingerprint import describe
from jaxserve.runtime.kv_cache import LayerCache
from jaxserve.runtime.memory import MemoryPlan
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.numerics.chosen_products import chosen_products
from jaxserve.runtime.program_set import ProgramSet, Shapes
from jaxserve.runtime.programs import StepPrograms
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.sampling import slots
from jaxserve.runtime.sampling.vocab import Vocab
from jaxserve.types.scheduling.window_size import WindowSize

_BOUND = ("bind", "mesh", "layers")  # fields of StepPrograms whose text differs between processes


@dataclass(frozen=True)
class RunnerSetup:
    """The fixed parts of a runner, made by `of`.

    layers   geometry of each layer's KV cache
    window   window of the sliding-window group in tokens; None: there is no such group
    steps    the step functions, not jitted
    """

    loaded: LoadedModel
    config: RunnerConfig
    mesh: DeviceMesh
    backend: Backend
    buckets: Buckets
    layers: tuple[LayerCache, ...]
    window: int | None
    steps: StepPrograms

    @classmethod
    def of(cls, loaded: LoadedModel, config: RunnerConfig, mesh: DeviceMesh) -> RunnerSetup:
        """Choose backend, buckets and layer groups. Raises ConfigError if the attention backend cannot run here."""
        backend = get_backend(config.attention, mesh.platform)
        attention = loaded.config.attention_layers
        window = kv_cache.group_window(attention, config.max_model_len)
        layers = kv_cache.layer_caches(
            attention, backend, config.page_size, config.cache_dtype, mesh, windowed=window is not None
        )
        buckets = make_buckets(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            platform=mesh.platform,
            num_parameters=loaded.structure.num_parameters,
            deterministic=config.deterministic,
            max_drafts=config.max_drafts,
        )
        steps = StepPrograms(
            bind=loaded.bind,
            backend=backend,
            layers=layers,
            page_size=config.page_size,
            linear=chosen_products(config, loaded, mesh, backend),
            mesh=mesh.mesh,
            normalize_embeddings=config.normalize_embeddings,
            per_token=config.deterministic,
        )
        return cls(loaded, config, mesh, backend, buckets, layers, window, steps)

    def plan(self, device_bytes: int | None = None) -> MemoryPlan:
        """Plan the memory. Raises ConfigError if the model does not fit.

        device_bytes: memory of all devices; None: it is asked of them
        """
        config, num_devices = self.config, len(self.mesh.devices)
        vocab_size = self.loaded.config.vocab_size
        parts = Vocab.of(vocab_size, self.mesh.mesh).parts
        state = slots.state_bytes(config.max_num_seqs, vocab_size, self._table_width(config.max_model_len), parts=parts)
        hidden = (
            self.buckets.max_tokens * self.loaded.config.hidden_size * self.loaded.structure.activation_dtype.itemsize
        )
        probe = config.num_pages is None and self.mesh.platform != "cpu" and device_bytes is None
        sizes = memory.Sizes(
            weight_bytes=sum(map(_bytes, self.loaded.leaves)),
            state_bytes=(state + hidden) * num_devices,
            scratch_bytes=(self._probe_scratch() if probe else self._estimate_scratch()) * num_devices,
            page_bytes=kv_cache.page_bytes(self.layers),
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            window_page_bytes=kv_cache.page_bytes(self.layers, group=1),
            window=self._window_size(),
        )
        plan = memory.plan_memory(
            sizes,
            config,
            platform=self.mesh.platform,
            device_bytes=memory.device_memory(self.mesh.devices) if device_bytes is None else device_bytes,
        )
        if config.host_memory is None:
            return plan
        return memory.plan_host_pages(plan, self._host_page(0), self._host_page(1), config.host_memory)

    def _host_page(self, group: int) -> int:
        """Return the bytes of one page of all layers of a group in the memory of the host."""
        pages = self.program_set((1, 1), self.config.max_model_len).exported_pages(1, group)
        return sum(math.prod(page.shape) * page.dtype.itemsize for page in jax.tree.leaves(pages))

    def program_set(self, num_pages: tuple[int, int], max_model_len: int) -> ProgramSet:
        """Make the programs for a KV cache of `num_pages` per layer group."""
        model = self.loaded.config
        state = slots.state_shapes(self.config.max_num_seqs, model.vocab_size, self._table_width(max_model_len))
        hidden = jax.ShapeDtypeStruct(
            (self.buckets.max_tokens, model.hidden_size),
            self.loaded.structure.activation_dtype,
            sharding=self.mesh.replicated,
        )
        shapes = Shapes.of(self.loaded.leaves, self.layers, self.mesh, num_pages=num_pages, state=state, hidden=hidden)
        options = compiler_options(
            self.mesh.platform, deterministic=self.config.deterministic, several=jax.process_count() > 1
        )
        return ProgramSet(
            self.steps, shapes, self.buckets, options, self.config.max_drafts, self._identity(max_model_len)
        )

    def _identity(self, max_model_len: int) -> str:
        """Return what the step functions depend on; see Program.identity."""
        steps = {f.name: getattr(self.steps, f.name) for f in dataclasses.fields(self.steps) if f.name not in _BOUND}
        weights = [(spec.name, spec.shape, jnp.dtype(spec.dtype).name) for spec in self.loaded.structure.specs]
        layers = [dataclasses.replace(layer, sharding=self.mesh.replicated) for layer in self.layers]
        parts = (self.loaded.config, weights, steps, layers, self.buckets, max_model_len, self.config.max_drafts)
        return hashlib.sha256(describe(parts).encode()).hexdigest()

    def _window_size(self) -> WindowSize | None:
        if self.window is None:
            return None
        config = self.config
        return WindowSize(self.window, config.page_size, config.max_num_batched_tokens, 1 + config.max_drafts)

    def _table_width(self, max_model_len: int) -> int:
        """Return the columns of a slot's row of page tables, all groups together."""
        return self.steps.num_groups * -(-max_model_len // self.config.page_size)

    def _probe_scratch(self) -> int:
        """Return the temporary bytes of the largest programs.

        They are compiled for a small KV cache, because its size does not change their temporary memory.
        """
        max_pages = -(-self.config.max_model_len // self.config.page_size)
        probe = compile_all(self.program_set((max_pages, max_pages), self.config.max_model_len).largest())
        return max(map(memory.scratch_bytes, probe.values()))

    def _estimate_scratch(self) -> int:
        """Return an upper estimate: ten float32 copies of a layer's widest activations, or of the logits."""
        model, rows = self.loaded.config, max(self.config.max_num_seqs, *self.buckets.verify, 1)
        widest = 2 * model.intermediate_size + 4 * model.hidden_size + 4 * model.num_heads * model.head_dim
        return 10 * 4 * max(self.buckets.max_tokens * widest, rows * model.vocab_size)


def _bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array over all devices."""
    sharding = leaf.sharding
    if sharding is None:
        return math.prod(leaf.shape) * leaf.dtype.itemsize
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(sharding.device_set)
