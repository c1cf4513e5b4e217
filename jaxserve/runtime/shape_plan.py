"""Bytes of weights and KV pages that a model would need on a mesh, computed from shapes without any device.

Nothing is allocated, so a model of 671 billion parameters can be planned on a laptop. It uses the server's own code:
parameter shardings of models.sharding, page shapes of the attention backend, the arithmetic of runtime.memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.structure import ModelStructure, build
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.ops.paged_attention import get_backend
from jaxserve.ops.paged_attention.scaled_pages import is_scaled
from jaxserve.runtime.memory import Sizes, split_pool
from jaxserve.runtime.mesh import AXES
from jaxserve.types.scheduling.window_size import WindowSize

PAGE_SIZE = 16  # tokens
_CHUNK = 8192  # tokens per step on an accelerator


@dataclass(frozen=True)
class ShapePlan:
    """The sizes of a model on a mesh. Bytes are per device."""

    tensor: int
    expert: int
    num_parameters: int  # of the published model, without copies of kv heads
    weight_bytes: int
    whole_bytes: int  # part of weight_bytes: replicated parameters
    largest_whole: tuple[str, int]  # name and bytes of the largest replicated parameter
    kv_token_bytes: int  # bytes of one token in all layers
    window: int | None = None  # widest sliding window in tokens; None: no layer has one
    window_token_bytes: int = 0  # part of kv_token_bytes: layers with a sliding window

    @property
    def num_devices(self) -> int:
        return self.tensor * self.expert

    def request_bytes(self, length: int) -> int:
        """Return the bytes of K and V of a decoding request of `length` tokens. Window layers keep only the window."""
        pages = -(-length // PAGE_SIZE)
        if self.window is None:
            return pages * PAGE_SIZE * self.kv_token_bytes
        kept = WindowSize(self.window, PAGE_SIZE, _CHUNK).most(length)
        everywhere = (self.kv_token_bytes - self.window_token_bytes) * pages
        return (everywhere + self.window_token_bytes * kept) * PAGE_SIZE

    def largest_batch(self, device_bytes: int, length: int, memory_fraction: float = 0.9) -> int:
        """Return how many requests of `length` tokens fit at once, next to the weights."""
        left = int(device_bytes * memory_fraction) - self.weight_bytes
        return max(0, left) // self.request_bytes(length)

    def kv_tokens(self, device_bytes: int, memory_fraction: float = 0.9) -> int:
        """Return how many tokens fit next to the weights if every layer keeps all of them; 0 if none do."""
        return max(0, int(device_bytes * memory_fraction) - self.weight_bytes) // self.kv_token_bytes

    def room(
        self, device_bytes: int, context: int, max_num_seqs: int = 512, memory_fraction: float = 0.9
    ) -> tuple[int, float]:
        """Return (tokens, requests of full context) that fit next to the weights if window layers keep only the window.

        Plans as the server does, for `max_num_seqs` requests and sequences of at most `context` tokens.
        """
        if self.window is None or self.window >= context:
            most = 2 * max_num_seqs * -(-context // PAGE_SIZE) * PAGE_SIZE  # as in memory.split_pool
            tokens = min(self.kv_tokens(device_bytes, memory_fraction), most)
            return tokens, tokens / context
        size = WindowSize(self.window, PAGE_SIZE, _CHUNK)
        sizes = Sizes(
            weight_bytes=self.weight_bytes,
            state_bytes=0,
            scratch_bytes=0,
            page_bytes=(self.kv_token_bytes - self.window_token_bytes) * PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_num_seqs=max_num_seqs,
            window_page_bytes=self.window_token_bytes * PAGE_SIZE,
            window=size,
        )
        left = max(0, int(device_bytes * memory_fraction) - self.weight_bytes)
        pages, window_pages = split_pool(left, sizes, context)
        tokens = pages * PAGE_SIZE
        return tokens, min(tokens / context, window_pages / size.most(context)) if tokens else 0.0


def default_mesh(config: ModelConfig, num_devices: int) -> tuple[int, int]:
    """Choose (tensor, expert) for `num_devices`: all over heads; for a mixture of experts, the kv heads' divisor.

    The remaining devices then split the experts.
    """
    if config.moe is None or config.latent is not None:
        return num_devices, 1
    tensor = math.gcd(num_devices, config.num_kv_heads)
    return tensor, num_devices // tensor


def plan_by_shape(
    config: ModelConfig,
    dtype: jnp.dtype,
    tensor: int,
    expert: int,
    *,
    cache_dtype: jnp.dtype | None = None,
) -> ShapePlan:
    """Plan a model on a mesh of tensor * expert devices. Raises ModelLoadError if the model cannot be split so.

    cache_dtype: None is `dtype`.
    """
    mesh = AbstractMesh((1, tensor, expert), AXES)
    published = build(config, dtype)
    split = for_mesh(config, mesh)
    structure = published if split == config else build(split, dtype)
    weights, whole, largest = _weights(structure, mesh)
    all_layers, windowed = _kv_token_bytes(split, cache_dtype or dtype, tensor)
    return ShapePlan(
        tensor=tensor,
        expert=expert,
        num_parameters=published.num_parameters,
        weight_bytes=weights,
        whole_bytes=whole,
        largest_whole=largest,
        kv_token_bytes=all_layers,
        window=max((window or 0 for window in config.windows), default=0) or None,
        window_token_bytes=windowed,
    )


def _weights(structure: ModelStructure, mesh: AbstractMesh) -> tuple[int, int, tuple[str, int]]:
    total, whole, largest = 0, 0, ("", 0)
    for spec in structure.specs:
        sharding = param_sharding(spec, mesh)
        size = math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
        total += size
        if mesh.size > 1 and sharding.is_fully_replicated:
            whole += size
            largest = max(largest, (spec.name, size), key=lambda pair: pair[1])
    return total, whole, largest


def _kv_token_bytes(config: ModelConfig, dtype: jnp.dtype, tensor: int) -> tuple[int, int]:
    """Return the bytes per token of all layers, and of the layers with a sliding window."""
    backend = get_backend("triton", "gpu")  # by shape: all are alike
    total = windowed = 0
    for layer in config.attention_layers:
        heads = layer.num_kv_heads // tensor if layer.num_kv_heads % tensor == 0 else layer.num_kv_heads
        shape = backend.cache_shape(1, PAGE_SIZE, heads, layer.head_dim, latent=layer.latent)
        size = math.prod(shape) * dtype.itemsize
        if is_scaled(dtype):
            size += math.prod(backend.scale_shape(1, PAGE_SIZE, heads, latent=layer.latent)) * 4
        total += size
        windowed += size if layer.sliding_window is not None else 0
    return total // PAGE_SIZE, windowed // PAGE_SIZE
