"""Computes the bytes of weights and KV pages that a model needs on a mesh, from shapes and without any device.

Nothing is allocated, so a model of 671 billion parameters can be planned on a laptop. It uses the server's own code:
parameter shardings of models.sharding, page shapes of the attention backend, the arithmetic of runtime.memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxserve.models.checkpoint.structure import ModelStructure, build
from jaxserve.models.config import ModelConfig
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.ops.paged_attention import get_backend
from jaxserve.ops.paged_attention.scaled_pages import is_scaled
from jaxserve.runtime.memory import Sizes, check_weight, split_pool, within_reach
from jaxserve.runtime.mesh import AXES
from jaxserve.types.scheduling import WindowSize

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
    # Bytes of an 8-bit page in one layer, the largest without a sliding window and with one; 0: there is none.
    reached: tuple[int, int] = (0, 0)

    @property
    def num_devices(self) -> int:
        return self.tensor * self.expert

    def request_bytes(self, length: int) -> int:
        """Return the bytes of K and V of a decoding request of `length` tokens. Window layers keep only the window."""
        pages, window_pages = self._request_pages(length)
        window_bytes = self.window_token_bytes * window_pages
        return ((self.kv_token_bytes - self.window_token_bytes) * pages + window_bytes) * PAGE_SIZE

    def _request_pages(self, length: int) -> tuple[int, int]:
        """Return the pages of a decoding request in a layer without a sliding window and in one with it."""
        pages = -(-length // PAGE_SIZE)
        return pages, pages if self.window is None else WindowSize(self.window, PAGE_SIZE, _CHUNK).most(length)

    def largest_batch(self, device_bytes: int, length: int, memory_fraction: float = 0.9) -> int:
        """Return the number of requests of `length` tokens that fit at once, beside the weights."""
        batch = self._left(device_bytes, memory_fraction) // self.request_bytes(length)
        each = zip(self._request_pages(length), self.reached, strict=True)
        return min(within_reach(batch * pages, size) // pages for pages, size in each)

    def kv_tokens(self, device_bytes: int, memory_fraction: float = 0.9) -> int:
        """Return the number of tokens that fit beside the weights if every layer keeps all of them; 0 if none do."""
        pages = self._left(device_bytes, memory_fraction) // (self.kv_token_bytes * PAGE_SIZE)
        return within_reach(pages, max(self.reached)) * PAGE_SIZE

    def _left(self, device_bytes: int, memory_fraction: float) -> int:
        return max(0, int(device_bytes * memory_fraction) - self.weight_bytes)

    def room(
        self, device_bytes: int, context: int, max_num_seqs: int = 512, memory_fraction: float = 0.9
    ) -> tuple[int, float]:
        """Return (tokens, requests of full context) that fit next to the weights if window layers keep only the window.

        It plans as the server does, for `max_num_seqs` requests and sequences of at most `context` tokens.
        """
        windowed = self.window is not None and self.window < context
        size = WindowSize(self.window, PAGE_SIZE, _CHUNK) if self.window is not None and windowed else None
        window_bytes = self.window_token_bytes if windowed else 0
        sizes = Sizes(
            weight_bytes=self.weight_bytes,
            state_bytes=0,
            scratch_bytes=0,
            page_bytes=(self.kv_token_bytes - window_bytes) * PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_num_seqs=max_num_seqs,
            window_page_bytes=window_bytes * PAGE_SIZE,
            window=size,
        )
        pages, window_pages = split_pool(self._left(device_bytes, memory_fraction), sizes, context)
        pages = within_reach(pages, self.reached[0] if windowed else max(self.reached))
        tokens = pages * PAGE_SIZE
        if size is None or not tokens:
            return tokens, tokens / context
        window_pages = within_reach(window_pages, self.reached[1])
        return tokens, min(tokens / context, window_pages / size.most(context))


def splits(config: ModelConfig, num_devices: int) -> list[tuple[int, int]]:
    """Return every (tensor, expert) of `num_devices`. The first is the one to start with.

    It splits over heads alone, and for a mixture of experts over a divisor of the kv heads: copies of kv heads save
    nothing, and the remaining devices can split the experts.
    """
    first = num_devices
    if config.moe is not None and config.latent is None:
        first = math.gcd(num_devices, config.num_kv_heads)
    others = (tensor for tensor in range(num_devices, 0, -1) if num_devices % tensor == 0 and tensor != first)
    return [(tensor, num_devices // tensor) for tensor in (first, *others)]


class ShapePlanner:
    """Plans a model on meshes whose kernels are Triton's: see `memory.within_reach`.

    cache_dtype: None is `dtype`. Raises ModelLoadError if the model cannot have this form on any mesh.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, cache_dtype: jnp.dtype | None = None) -> None:
        self.config = config
        self.published = build(config, dtype)
        self._dtype = dtype
        self._cache_dtype = cache_dtype or dtype
        # A structure takes seconds for a mixture of experts, and most meshes have the published one.
        self._structures = {config: self.published}

    def plan(self, tensor: int, expert: int) -> ShapePlan:
        """Plan the model on tensor * expert devices.

        Raises ModelLoadError if it cannot be split so, and ConfigError if the kernels would read only a part of a
        weight.
        """
        mesh = AbstractMesh((1, tensor, expert), AXES)
        split = for_mesh(self.config, mesh)
        if split not in self._structures:
            self._structures[split] = build(split, self._dtype)
        weights, whole, largest = _weights(self._structures[split], mesh)
        all_layers, windowed, reached = _kv_token_bytes(split, self._cache_dtype, tensor)
        return ShapePlan(
            tensor=tensor,
            expert=expert,
            num_parameters=self.published.num_parameters,
            weight_bytes=weights,
            whole_bytes=whole,
            largest_whole=largest,
            kv_token_bytes=all_layers,
            window=max((window or 0 for window in self.config.windows), default=0) or None,
            window_token_bytes=windowed,
            reached=reached,
        )


def _weights(structure: ModelStructure, mesh: AbstractMesh) -> tuple[int, int, tuple[str, int]]:
    total, whole, largest = 0, 0, ("", 0)
    for spec in structure.specs:
        sharding = param_sharding(spec, mesh)
        size = math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
        if spec.dtype.itemsize == 1:
            check_weight(spec.name, size)
        total += size
        if mesh.size > 1 and sharding.is_fully_replicated:
            whole += size
            largest = max(largest, (spec.name, size), key=lambda pair: pair[1])
    return total, whole, largest


def _kv_token_bytes(config: ModelConfig, dtype: jnp.dtype, tensor: int) -> tuple[int, int, tuple[int, int]]:
    """Return the bytes per token of all layers and of the layers with a sliding window, and `ShapePlan.reached`."""
    backend = get_backend("triton", "gpu")  # by shape: all are alike
    total = windowed = 0
    reached = [0, 0]
    for layer in config.attention_layers:
        heads = layer.num_kv_heads // tensor if layer.num_kv_heads % tensor == 0 else layer.num_kv_heads
        shape = backend.cache_shape(1, PAGE_SIZE, heads, layer.head_dim, latent=layer.latent)
        has_window = layer.sliding_window is not None
        size = math.prod(shape) * dtype.itemsize
        if is_scaled(dtype):
            reached[has_window] = max(reached[has_window], size)
            size += math.prod(backend.scale_shape(1, PAGE_SIZE, heads, latent=layer.latent)) * 4
        total += size
        windowed += size if has_window else 0
    return total // PAGE_SIZE, windowed // PAGE_SIZE, (reached[0], reached[1])
