"""The arrays of the cache: each layer's pages of K and V, in the attention backend's layout, or its recurrent states.

Layers form groups. Each group has its own number of pages and its own page tables. Group 0 keeps all pages of a
request. Layers with a sliding window or with chunks keep the pages that can still be seen; the layers of each width are
a group, from group 1 on. Layers with a recurrent state are the last group, if there are any.

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
from jaxserve.ops.paged_attention.scaled_pages import ScaledPages, is_scaled
from jaxserve.ops.paged_attention.sharded import head_partition
from jaxserve.ops.state import StateArrays, StateSpec, ring_length, state_shapes
from jaxserve.ops.state.sharded import RING, STATE
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.types.scheduling import Reach


@dataclass(frozen=True)
class LayerCache:
    """The geometry of one layer's cache, an array [num_pages, *page_shape].

    reads: index of the layer whose cache this layer attends to. It has no array of its own, and no bytes.
    """

    page_shape: tuple[int, ...]
    dtype: jnp.dtype  # of the array; with 8 bits a second one has the scales, float32 [num_pages, *scale_shape]
    sharding: NamedSharding
    num_kv_heads: int
    attention: AttentionSpec
    group: int = 0
    scale_shape: tuple[int, ...] | None = None
    reads: int | None = None

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page over all devices, copies included."""
        return _bytes(self.struct(1))

    def struct(self, num_pages: int) -> Any:
        """Return the shapes, dtypes and sharding of the cache with `num_pages` pages, in the form of `Pages`.

        None: the layer reads another layer's.
        """
        if self.reads is not None:
            return None
        values = jax.ShapeDtypeStruct((num_pages, *self.page_shape), self.dtype, sharding=self.sharding)
        if self.scale_shape is None:
            return values
        scales: Any = jax.ShapeDtypeStruct((num_pages, *self.scale_shape), jnp.float32, sharding=self.sharding)
        return ScaledPages(cast(jax.Array, values), scales)


@dataclass(frozen=True)
class StateCache:
    """The geometry of one layer's recurrent states, `ops.state.StateArrays`.

    dtype: of the rings. sharding: replicated; the mesh of the arrays is taken from it. max_drafts: of a row
    """

    spec: StateSpec
    dtype: jnp.dtype
    sharding: NamedSharding
    group: int
    max_drafts: int = 0

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page over all devices, copies included."""
        return _bytes(self.struct(1))

    def struct(self, num_pages: int) -> Any:
        """Return the shapes, dtypes and shardings of `StateArrays` with `num_pages` pages."""
        state, ring = state_shapes(self.spec, num_pages, ring_length(self.spec, self.max_drafts))
        mesh = self.sharding.mesh
        matrix = state and jax.ShapeDtypeStruct(state, jnp.float32, sharding=NamedSharding(mesh, STATE))
        kept: Any = jax.ShapeDtypeStruct(ring, self.dtype, sharding=NamedSharding(mesh, RING))
        return StateArrays(cast(jax.Array | None, matrix), kept)


AnyCache = LayerCache | StateCache


def _bytes(structs: Any) -> int:
    """Return the bytes of arrays with shardings over all devices, copies included."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * leaf.sharding.num_devices
        for leaf in jax.tree.leaves(structs)
    )


def with_states(
    caches: Sequence[LayerCache],
    states: Sequence[StateSpec | None],
    dtype: jnp.dtype,
    mesh: DeviceMesh,
    max_drafts: int = 0,
) -> tuple[AnyCache, ...]:
    """Return the caches, with a StateCache in the place of each layer that has a recurrent state.

    states: by layer; (): no layer has one. dtype: of the activations. max_drafts: of a row
    """
    group = 1 + max((cache.group for cache in caches), default=0)
    return tuple(
        cache if state is None else StateCache(state, dtype, mesh.replicated, group, max_drafts)
        for cache, state in zip(caches, states or (None,) * len(caches), strict=True)
    )


def layer_caches(
    layers: Sequence[AttentionLayer],
    backend: Backend,
    page_size: int,
    dtype: jnp.dtype,
    mesh: DeviceMesh,
    *,
    groups: Sequence[Reach] = (),
) -> tuple[LayerCache, ...]:
    """Make one LayerCache per layer, split over kv heads, or replicated if these cannot be split (MLA has only one).

    groups: from `layer_groups`. Raises ConfigError if the backend cannot serve a layer's sizes or pages of this dtype.
    """
    return tuple(_layer_cache(layer, backend, page_size, dtype, mesh, groups) for layer in layers)


def _layer_cache(
    layer: AttentionLayer,
    backend: Backend,
    page_size: int,
    dtype: jnp.dtype,
    mesh: DeviceMesh,
    groups: Sequence[Reach],
) -> LayerCache:
    heads = layer.num_kv_heads
    shape = backend.cache_shape(1, page_size, heads, layer.head_dim, latent=layer.latent)
    split = mesh.tensor > 1 and heads % mesh.tensor == 0
    sharding = NamedSharding(mesh.mesh, head_partition(backend)) if split else mesh.replicated
    spec = AttentionSpec(layer.scale, heads, layer.sliding_window, layer.soft_cap, layer.value_columns, layer.chunk)
    reach = layer_reach(layer)
    group = 0 if reach not in groups else 1 + groups.index(reach)
    scales = backend.scale_shape(1, page_size, heads, latent=layer.latent)[1:] if is_scaled(dtype) else None
    held = backend.held_dtype(dtype)
    return LayerCache(tuple(shape[1:]), held, sharding, heads, spec, group, scales, layer.reads)


def layer_groups(layers: Sequence[AttentionLayer], max_model_len: int) -> tuple[Reach, ...]:
    """Return the reach of each layer group from 1 on, the farthest first.

    A layer belongs to group 0 if it sees all tokens, or if no sequence is longer than its reach.
    """
    reaches = {layer_reach(layer) for layer in layers}
    found = [reach for reach in reaches if reach is not None and reach.tokens < max_model_len]
    return tuple(sorted(found, key=lambda reach: (-reach.tokens, reach.kind)))


def layer_reach(layer: AttentionLayer) -> Reach | None:
    """Return which tokens a token sees in a layer; None: all."""
    if layer.chunk is not None:
        return Reach("chunk", layer.chunk)
    return None if layer.sliding_window is None else Reach("window", layer.sliding_window)


def page_bytes(caches: Sequence[AnyCache], group: int = 0) -> int:
    """Return the bytes of one page in all layers of a group."""
    return sum(cache.page_bytes for cache in caches if cache.group == group)


def allocate(caches: Sequence[AnyCache], num_pages: Sequence[int]) -> tuple[Any, ...]:
    """Allocate zeroed pages, one pytree per layer. num_pages: of each group."""

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    return tuple(jax.tree.map(zeros, cache.struct(num_pages[cache.group])) for cache in caches)
