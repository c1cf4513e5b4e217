"""The arrays of the KV cache: pages per layer, in the attention backend's layout.

Layers form groups. Each group has its own number of pages and its own page tables. Group 0 keeps all pages of a
request. Group 1, the layers with a sliding window, keeps the pages that can still be seen. A model without sliding
windows has only group 0.

This file decides each layer's page shape, dtype and sharding, and allocates. The page pool assigns pages to requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxserve.models.config import AttentionLayer
from jaxserve.ops.paged_attention import AttentionSpec, Backend
from jaxserve.ops.paged_attention.scaled_pages import Pages, ScaledPages, is_scaled
from jaxserve.ops.paged_attention.sharded import head_partition
from jaxserve.runtime.mesh import DeviceMesh


@dataclass(frozen=True)
class LayerCache:
    """The geometry of one layer's cache, an array [num_pages, *page_shape]."""

    page_shape: tuple[int, ...]
    dtype: jnp.dtype  # of the array; with 8 bits a second one has the scales, float32 [num_pages, *scale_shape]
    sharding: NamedSharding
    num_kv_heads: int
    attention: AttentionSpec
    group: int = 0
    scale_shape: tuple[int, ...] | None = None

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page over all devices, copies included."""
        shards = [(self.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(self.struct(1))]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards) * self.sharding.num_devices

    def struct(self, num_pages: int) -> Any:
        """Return the shapes, dtypes and sharding of the cache with `num_pages` pages, in the form of `Pages`."""
        values = jax.ShapeDtypeStruct((num_pages, *self.page_shape), self.dtype, sharding=self.sharding)
        if self.scale_shape is None:
            return values
        scales: Any = jax.ShapeDtypeStruct((num_pages, *self.scale_shape), jnp.float32, sharding=self.sharding)
        return ScaledPages(cast(jax.Array, values), scales)


def layer_caches(
    layers: Sequence[AttentionLayer],
    backend: Backend,
    page_size: int,
    dtype: jnp.dtype,
    mesh: DeviceMesh,
    *,
    windowed: bool = False,
) -> tuple[LayerCache, ...]:
    """Make one LayerCache per layer, split over kv heads, or replicated if these cannot be split (MLA has only one).

    windowed: layers with a sliding window are a group of their own. Raises ConfigError if the backend cannot serve a
    layer's sizes or pages of this dtype.
    """
    return tuple(_layer_cache(layer, backend, page_size, dtype, mesh, windowed) for layer in layers)


def _layer_cache(
    layer: AttentionLayer,
    backend: Backend,
    page_size: int,
    dtype: jnp.dtype,
    mesh: DeviceMesh,
    windowed: bool,
) -> LayerCache:
    heads = layer.num_kv_heads
    shape = backend.cache_shape(1, page_size, heads, layer.head_dim, latent=layer.latent)
    split = mesh.tensor > 1 and heads % mesh.tensor == 0
    sharding = NamedSharding(mesh.mesh, head_partition(backend)) if split else mesh.replicated
    spec = AttentionSpec(layer.scale, heads, layer.sliding_window, layer.soft_cap, layer.value_columns)
    group = int(windowed and layer.sliding_window is not None)
    scales = backend.scale_shape(1, page_size, heads, latent=layer.latent)[1:] if is_scaled(dtype) else None
    return LayerCache(tuple(shape[1:]), backend.held_dtype(dtype), sharding, heads, spec, group, scales)


def group_window(layers: Sequence[AttentionLayer], max_model_len: int) -> int | None:
    """Return the window of the sliding-window group: the widest of its layers.

    Returns None if no layer has a window, or if no sequence can be longer than the widest window.
    """
    widest = max((layer.sliding_window or 0 for layer in layers), default=0)
    return widest if 0 < widest < max_model_len else None


def page_bytes(caches: Sequence[LayerCache], group: int = 0) -> int:
    """Return the bytes of one page in all layers of a group."""
    return sum(cache.page_bytes for cache in caches if cache.group == group)


def allocate(caches: Sequence[LayerCache], num_pages: Sequence[int]) -> tuple[Pages, ...]:
    """Allocate zeroed pages, one pytree per layer. num_pages: by group."""

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    return tuple(jax.tree.map(zeros, cache.struct(num_pages[cache.group])) for cache in caches)
