"""The runner of an encoder: takes SchedulerOutput, returns embeddings. It has no KV cache, no slots and no sampling.

It has the weights and the compiled programs `encode[R, L]`: R texts of at most L tokens each, forward pass and pooling
in one dispatch. The texts of a step are grouped by length, so that a short text is not padded to a long one's length.
The scheduler chooses the texts of a step and never splits one.
"""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.encoder import TextClassifier, Texts
from jaxserve.models.pooling import PoolingConfig, pool
from jaxserve.ops.linear import Products
from jaxserve.runtime import memory
from jaxserve.runtime.compilation import program_cache
from jaxserve.runtime.compilation.buckets import EncodeBuckets
from jaxserve.runtime.compilation.compiler import (
    CompileCounter,
    Program,
    ProgramStorage,
    Progress,
    compile_all,
    compiler_options,
    compiles_programs,
)
from jaxserve.runtime.fingerprint import describe
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import exact, is_rounded
from jaxserve.runtime.step_input import DeviceStep, Pooled, StepOutputs
from jaxserve.types.step import ScheduledRow, SchedulerOutput

Leaves = tuple[jax.Array, ...]


class EncoderRunner:
    """The device side of an engine that serves an encoder (implements `types.step.StepRunner`).

    config, plan       as resolved; plan.max_model_len is the longest text in tokens
    leaves             the weights on the devices
    compile_seconds    time to compile all programs
    num_dispatches     programs started so far
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pooling: PoolingConfig,
        config: RunnerConfig,
        mesh: DeviceMesh,
        *,
        progress: Progress | None = None,
        store: ProgramStorage | None = None,
    ) -> None:
        started = time.perf_counter()
        if store is None and config.compile_cache is not None:
            program_cache.enable(config.compile_cache)
        self.config = config
        self.store = store
        self.mesh = mesh
        self.leaves: Leaves = loaded.leaves
        self.draft_leaves: Leaves = ()
        longest = longest_text(config, pooling)
        self.buckets = EncodeBuckets.of(
            config.max_num_seqs, config.max_num_batched_tokens, longest, deterministic=config.deterministic
        )
        self._encode = functools.partial(encode, loaded.structure, pooling, config.deterministic)
        if is_rounded(mesh.platform, loaded.structure.activation_dtype):
            self._encode = exact(self._encode)
        weights = [(spec.name, spec.shape, jnp.dtype(spec.dtype).name) for spec in loaded.structure.specs]
        self._identity = describe((loaded.config, weights, pooling, config.deterministic))
        wanted = [self._program(*shape) for shape in self.buckets.shapes()]
        self.compiled = compile_all(wanted, progress=progress, store=store)
        self._by_shape = {(rows, length): self.compiled[_name(rows, length)] for rows, length in self.buckets.shapes()}
        self.plan = memory.plan_without_cache(
            sum(shard.data.nbytes for leaf in self.leaves for shard in leaf.addressable_shards),
            max(map(memory.scratch_bytes, self.compiled.values())) * len(mesh.devices),
            device_bytes=memory.device_memory(mesh.devices),
            memory_fraction=config.memory_fraction,
            max_model_len=longest,
        )
        self.num_dispatches = 0
        self.compile_seconds = time.perf_counter() - started
        self._counter = CompileCounter(compiles_programs)

    def _program(self, rows: int, length: int) -> Program:
        leaves = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in self.leaves)
        packed = jax.ShapeDtypeStruct((rows, 2 + length), jnp.int32, sharding=self.mesh.replicated)
        options = compiler_options(self.mesh.platform, deterministic=self.config.deterministic)
        name, weight = _name(rows, length), rows * length
        return Program(name, self._encode, (leaves, packed), (), self.mesh.replicated, weight, options, self._identity)

    @property
    def num_programs(self) -> int:
        return len(self.compiled)

    def num_compiles(self) -> int:
        """Return the XLA compilations in this process since the runner was ready. It must stay 0 while serving."""
        return self._counter.count

    def rebuild(self) -> None:
        """Do nothing: an encoder keeps no state on the device between steps."""

    def release(self) -> None:
        """Do nothing, like `rebuild`."""

    def close(self) -> None:
        """Stop counting compilations. The arrays are freed with the object."""
        self._counter.close()

    def execute(self, output: SchedulerOutput) -> DeviceStep:
        """Dispatch a step of whole texts without waiting for it. Raises ValueError if a text is too long."""
        rows = output.rows
        pooled: list[Pooled] = []
        for shape, members in self.buckets.pack([row.num_tokens for row in rows]):
            self.num_dispatches += 1
            packed = pack_texts([rows[i] for i in members], *shape)
            pooled.append((members, self._by_shape[shape](self.leaves, packed)))
        return DeviceStep(len(rows), [], None, StepOutputs(pooled=pooled))


def longest_text(config: RunnerConfig, pooling: PoolingConfig) -> int:
    """Return the longest text in tokens: the configured one, else the smallest limit of model, pooling and step.

    Raises ConfigError if a text of the configured length does not fit into a step.
    """
    room = config.max_num_batched_tokens
    if config.shrink_context:
        return min(config.max_model_len, pooling.max_tokens or config.max_model_len, room)
    if config.max_model_len > room:
        raise ConfigError(
            f"a text may have {config.max_model_len} tokens and must run in one step, which has {room}",
            fix="raise scheduler.max_num_batched_tokens or lower model.max_model_len",
        )
    return config.max_model_len


def _name(rows: int, length: int) -> str:
    return f"encode[{rows}, {length}]"


def pack_texts(texts: list[ScheduledRow], rows: int, length: int) -> np.ndarray:
    """Pack texts -> int32 [rows, 2 + length]: number of tokens, first token of type 1 (0: none), then the tokens.

    The array is newly allocated, because the device reads it after the call returns.
    """
    packed = np.zeros((rows, 2 + length), np.int32)
    for out, text in zip(packed, texts, strict=False):
        out[:2] = text.num_tokens, text.second_text
        out[2 : 2 + text.num_tokens] = text.token_ids
    return packed


def encode(
    structure: ModelStructure, pooling: PoolingConfig, deterministic: bool, leaves: Leaves, packed: jax.Array
) -> jax.Array:
    """Encode packed, int32 [R, 2 + L] from `pack_texts` -> embeddings float32 [R, D], or a head's [R, labels]."""
    lengths, seconds, token_ids = packed[:, 0], packed[:, 1], packed[:, 2:]
    model = structure.bind_encoder(leaves)
    multiply = Products(deterministic=deterministic)
    hidden = model(Texts(token_ids, lengths, seconds), multiply)
    if isinstance(model, TextClassifier):
        return model.scores(hidden, multiply)
    return pool(hidden, lengths, pooling)
