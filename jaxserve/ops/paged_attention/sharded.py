"""Attention over a mesh: each device of the "tensor" axis has the pages of its kv heads and the query heads for them.

It runs under shard_map, because the compiler cannot split a kernel and would split plain XLA attention so that scores
are summed across devices. It needs no communication. If kv heads cannot be split (the single head of latent attention),
the cache is replicated: every device writes all of it and attends for its own query heads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, Backend, Heads, WritesHeads
from jaxserve.ops.paged_attention.scaled_pages import Pages


@dataclass(frozen=True)
class MeshAttention:
    """Attention by `backend` over the devices of `mesh`. None: one device."""

    backend: Backend
    mesh: Mesh | AbstractMesh | None = None

    def __call__(
        self,
        heads: Heads,
        cache: Pages,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Pages]:
        """Write k and v [T, KH, D] to the cache and attend q [T, N, D] to it -> (out [T, N, D], cache).

        Without k and v nothing is written. sinks: [N] or None. `spec` counts the kv heads of the whole layer.
        """
        local = partial(self._local, spec=spec)
        q, k, v, projected = heads
        if self.mesh is None or self.mesh.size == 1:
            if projected is not None and isinstance(self.backend, WritesHeads) and isinstance(cache, jax.Array):
                # XLA then drops the computation of q, k and v, because nothing reads them.
                q, cache = self.backend.write_heads(projected, cache, metadata.slot_mapping)
                return self.backend.attend(q, cache, metadata, spec, sinks), cache
            return local((q, k, v), cache, metadata, sinks)
        by_head = P(None, "tensor", None)
        kv, pages = P(), P()
        if self._num_own(spec.num_kv_heads) < spec.num_kv_heads or self.mesh.shape["tensor"] == 1:
            kv, pages = by_head, head_partition(self.backend)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=((by_head, kv, kv), pages, P(), P("tensor")),
            out_specs=(by_head, pages),
            check_vma=False,
        )((q, k, v), cache, metadata, sinks)

    def _local(
        self,
        heads: tuple[jax.Array, jax.Array | None, jax.Array | None],
        cache: Pages,
        metadata: AttentionMetadata,
        sinks: jax.Array | None,
        *,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, Pages]:
        """Write and attend on one device: q [T, its N, D], k and v [T, its KH, D]."""
        q, k, v = heads
        if k is not None and v is not None:
            cache = self.backend.write(cache, k, v, metadata.slot_mapping)
        mine = dataclasses.replace(spec, num_kv_heads=self._num_own(spec.num_kv_heads))
        return self.backend.attend(q, cache, metadata, mine, sinks), cache

    def _num_own(self, num_kv_heads: int) -> int:
        """Return how many of a layer's kv heads a device has: all of them if they cannot be split."""
        parts = 1 if self.mesh is None else self.mesh.shape["tensor"]
        return num_kv_heads if num_kv_heads % parts else num_kv_heads // parts


def head_partition(backend: Backend) -> P:
    """Return the PartitionSpec that splits a layer's cache array over kv heads."""
    shapes = zip(backend.cache_shape(2, 16, 1, 64), backend.cache_shape(2, 16, 2, 64), strict=True)  # sizes of all
    return P(*("tensor" if one != two else None for one, two in shapes))
