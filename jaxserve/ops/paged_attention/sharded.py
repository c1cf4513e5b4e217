"""Attention over a mesh: each device of the "tensor" axis has the pages of its kv heads and the query heads for them.

Runs under shard_map, because the compiler cannot split a kernel and would split plain XLA attention so that scores are
summed across devices. Needs no communication. If kv heads cannot be split (the single head of latent attention), the
cache is replicated: every device writes all of it and attends for its own query heads.
"""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, Backend, Heads, WritesHeads
from jaxserve.ops.paged_attention.scaled_pages import Pages


def write_and_attend(
    backend: Backend,
    mesh: Mesh | AbstractMesh | None,
    heads: Heads,
    cache: Pages,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Pages]:
    """Write k and v [T, KH, D] to the cache and attend q [T, N, D] to it -> (out [T, N, D], cache).

    sinks: [N] or None. `spec` counts the kv heads of the whole model.
    """
    q, k, v, projected = heads

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Pages,
        metadata: AttentionMetadata,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, Pages]:
        """Write and attend on one device: q [T, its N, D], k and v [T, its KH, D]."""
        mine = dataclasses.replace(spec, num_kv_heads=k.shape[1])
        cache = backend.write(cache, k, v, metadata.slot_mapping)
        return backend.attend(q, cache, metadata, mine, sinks), cache

    if mesh is None or mesh.shape.get("tensor", 1) == 1:
        if projected is not None and isinstance(backend, WritesHeads) and isinstance(cache, jax.Array):
            # XLA drops the computation of q, k and v, which nothing reads then.
            q, cache = backend.write_heads(projected, cache, metadata.slot_mapping)
            return backend.attend(q, cache, metadata, spec, sinks), cache
        return local(q, k, v, cache, metadata, sinks)
    by_head = P(None, "tensor", None)
    kv, pages = P(), P()
    if spec.num_kv_heads % mesh.shape["tensor"] == 0:
        kv, pages = by_head, head_partition(backend)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(by_head, kv, kv, pages, P(), P("tensor")),
        out_specs=(by_head, pages),
        check_vma=False,
    )(q, k, v, cache, metadata, sinks)


def head_partition(backend: Backend) -> P:
    """Return the PartitionSpec that splits a layer's cache array over kv heads."""
    shapes = zip(backend.cache_shape(2, 8, 1, 16), backend.cache_shape(2, 8, 2, 16), strict=True)
    return P(*("tensor" if one != two else None for one, two in shapes))
