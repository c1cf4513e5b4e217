"""Attention over a mesh: each device of the "tensor" axis has its kv heads' pages and the query heads that read them.

Under shard_map, because a kernel cannot be split by the compiler, and because plain XLA attention, left to it, sums
scores over devices. No communication: query heads go with their kv head. A cache whose heads cannot be split (the one
row of latent attention) is whole on every device, which writes it all and attends for its own query heads.
"""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, Backend


def write_and_attend(
    backend: Backend,
    mesh: Mesh | AbstractMesh | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: jax.Array,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`write`, then `attend`: (out [T, N, D], cache). `spec` counts all kv heads of the model."""

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        metadata: AttentionMetadata,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        mine = dataclasses.replace(spec, num_kv_heads=k.shape[1])
        cache = backend.write(cache, k, v, metadata.slot_mapping)
        return backend.attend(q, cache, metadata, mine, sinks), cache

    if mesh is None or mesh.shape.get("tensor", 1) == 1:
        return local(q, k, v, cache, metadata, sinks)
    heads = P(None, "tensor", None)
    kv, pages = P(), P()
    if spec.num_kv_heads % mesh.shape["tensor"] == 0:
        kv, pages = heads, head_partition(backend)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, kv, kv, pages, P(), P("tensor")),
        out_specs=(heads, pages),
        check_vma=False,
    )(q, k, v, cache, metadata, sinks)


def head_partition(backend: Backend) -> P:
    """How a layer's cache array is split over kv heads."""
    shapes = zip(backend.cache_shape(2, 8, 1, 16), backend.cache_shape(2, 8, 2, 16), strict=True)
    return P(*("tensor" if one != two else None for one, two in shapes))
