"""The reference that other backends are tested against: paged attention token by token, in float32 and plain jnp.

Slow. Its temporary memory is the context of one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, InterleavedLayout
from jaxserve.ops.paged_attention.scaled_pages import Pages


@dataclass(frozen=True)
class ReferenceBackend(InterleavedLayout):
    """Reads the whole width of the page table for each token."""

    name: str = "reference"

    def attend(
        self,
        q: jax.Array,
        cache: Pages,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attend q [T, N, D] -> [T, N, D], see `Backend.attend`."""
        token_row, position = _place_tokens(metadata, q.shape[0])

        def attend_token(token: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            """Attend one (query [N, D], row int32 [], position int32 []) -> [N, D]."""
            query, row, pos = token
            kept = jax.tree.map(lambda leaf: leaf[metadata.page_table[row]], cache)
            pages = kept.astype(jnp.float32)  # [max_pages, page_size, 2 * KH or KH, D]
            return _attend_one(query, pages.reshape(-1, *pages.shape[2:]), pos, spec, sinks)

        return jax.lax.map(attend_token, (q, token_row, position)).astype(q.dtype)


def _place_tokens(metadata: AttentionMetadata, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the row and the position of each token, int32 [T]. Padding and empty rows get position -1: see nothing."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    num_rows = metadata.kv_lens.shape[0]
    starts = token if metadata.decode_only else metadata.cu_q_lens
    row = token if metadata.decode_only else jnp.searchsorted(starts, token, side="right").astype(jnp.int32) - 1
    ends = token + 1 if metadata.decode_only else metadata.cu_q_lens[1:]
    row = jnp.where(row < num_rows, row, num_rows - 1)
    kv_len = metadata.kv_lens[row]
    position = kv_len - ends[row] + token
    return row, jnp.where((token < ends[row]) & (kv_len > 0), position, -1)


def _attend_one(
    query: jax.Array, context: jax.Array, position: jax.Array, spec: AttentionSpec, sinks: jax.Array | None
) -> jax.Array:
    """Attend query [N, D] to the positions of context [C, 2 * KH, D] up to its own -> float32 [N, D]."""
    heads, head_dim = query.shape
    kv = context.reshape(context.shape[0], spec.num_kv_heads, -1, head_dim).astype(jnp.float32)  # K and V, or K alone
    grouped = query.reshape(spec.num_kv_heads, -1, head_dim).astype(jnp.float32)
    scores = jnp.einsum("hgd,chd->hgc", grouped, kv[:, :, 0], precision="highest") * spec.scale
    if spec.soft_cap is not None:
        scores = jnp.tanh(scores / spec.soft_cap) * spec.soft_cap
    column = jnp.arange(kv.shape[0], dtype=jnp.int32)
    seen = column <= position
    if not spec.sees_all:
        seen &= spec.reaches(column, position)
    scores = jnp.where(seen[None, None, :], scores, -jnp.inf).reshape(heads, -1)
    sink = jnp.full((heads, 1), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)[:, None]
    top = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), sink)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=1, keepdims=True) + jnp.exp(sink - jnp.where(jnp.isfinite(top), top, 0.0))
    weights = (weights / jnp.where(total > 0, total, 1.0)).reshape(spec.num_kv_heads, -1, kv.shape[0])
    values = jnp.where(seen[:, None, None], kv[:, :, -1], 0.0)  # a page never written may hold NaN
    return jnp.einsum("hgc,chd->hgd", weights, values, precision="highest").reshape(heads, head_dim)
