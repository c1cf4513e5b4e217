"""The runner of an encoder: SchedulerOutput in, embeddings out. No KV cache, no slots, no sampling.

Owns the weights and the compiled programs `encode[R, L]`: R texts of at most L tokens each, forward and pooling in one
dispatch. A step's texts are grouped by length, so that a short one is not padded to a long one's. Which texts make a
step is the scheduler's decision; it gives a text whole or not at all.
"""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.models.loading.loader import LoadedModel
from jaxserve.models.loading.structure import ModelStructure
from jaxserve.models.pooling import PoolingConfig, pool
from jaxserve.ops.linear import linear
from jaxserve.runtime import memory
from jaxserve.runtime.compilation import program_cache
from jaxserve.runtime.compilation.buckets import EncodeBuckets
from jaxserve.runtime.compilation.compiler import CompileCounter, Program, Progress, compile_all, compiler_options
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.step_handle import DeviceStep, Pooled
from jaxserve.types.step import ScheduledRow, SchedulerOutput

Leaves = tuple[jax.Array, ...]


class EncoderRunner:
    """The device side of an engine that serves an encoder (`engine.request.Runner`).

    config, plan       as resolved; plan.max_model_len is the longest text, in tokens
    leaves             the weights on the device
    compile_seconds    of all programs
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
    ) -> None:
        started = time.perf_counter()
        if config.compile_cache is not None:
            program_cache.enable(config.compile_cache)
        self.config = config
        self.mesh = mesh
        self.leaves: Leaves = loaded.leaves
        longest = longest_text(config, pooling)
        self.buckets = EncodeBuckets.of(
            config.max_num_seqs, config.max_num_batched_tokens, longest, deterministic=config.deterministic
        )
        self._encode = functools.partial(encode, loaded.structure, pooling, config.deterministic)
        self.compiled = compile_all([self._program(*shape) for shape in self.buckets.shapes()], progress=progress)
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
        self._counter = CompileCounter()

    def _program(self, rows: int, length: int) -> Program:
        leaves = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in self.leaves)
        packed = jax.ShapeDtypeStruct((rows, 1 + length), jnp.int32, sharding=self.mesh.replicated)
        options = compiler_options(self.mesh.platform, deterministic=self.config.deterministic)
        name, weight = _name(rows, length), rows * length
        return Program(name, self._encode, (leaves, packed), (), self.mesh.replicated, weight, options)

    @property
    def num_programs(self) -> int:
        return len(self.compiled)

    def num_compiles(self) -> int:
        """XLA compilations in this process since the runner was ready; 0 while it serves."""
        return self._counter.count

    def rebuild(self) -> None:
        """There is nothing to make anew: a text leaves nothing on the device."""

    def close(self) -> None:
        """Stop counting compilations. The arrays go with the object."""
        self._counter.close()

    def execute(self, output: SchedulerOutput) -> DeviceStep:
        """Dispatch a step of whole texts and return at once. Raises ValueError for a text that is too long."""
        rows = output.rows
        pooled: list[Pooled] = []
        for shape, members in self.buckets.pack([row.num_tokens for row in rows]):
            self.num_dispatches += 1
            packed = pack_texts([rows[i] for i in members], *shape)
            pooled.append((members, self._by_shape[shape](self.leaves, packed)))
        return DeviceStep(len(rows), [], None, False, pooled=pooled)


def longest_text(config: RunnerConfig, pooling: PoolingConfig) -> int:
    """Tokens of the longest text: as asked for, else what model, pooling and a step have room for.

    Raises ConfigError where a text of the length asked for would not fit into a step.
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
    """int32 [rows, 1 + length]: the number of tokens, then the tokens. Freshly allocated: the device reads it later."""
    packed = np.zeros((rows, 1 + length), np.int32)
    for out, text in zip(packed, texts, strict=False):
        out[0] = text.num_tokens
        out[1 : 1 + text.num_tokens] = text.token_ids
    return packed


def encode(
    structure: ModelStructure, pooling: PoolingConfig, deterministic: bool, leaves: Leaves, packed: jax.Array
) -> jax.Array:
    """packed: int32 [R, 1 + L] as `pack_texts` makes it -> embeddings, float32 [R, D]."""
    lengths, token_ids = packed[:, 0], packed[:, 1:]
    model = structure.bind_encoder(leaves)
    hidden = model(token_ids, lengths, functools.partial(linear, deterministic=deterministic))
    return pool(hidden, lengths, pooling)
