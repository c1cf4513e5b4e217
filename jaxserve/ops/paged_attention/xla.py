"""Paged attention in plain XLA. Tuned for the CPU; runs on every platform.

Owns the layout [P, 2, page_size, KH * D], K first and V second. Loops run over the tiles of a row's context with
bounds read from data: the time grows with the context and not with the width of the page table, and no context length
needs a new program. Scores, softmax and sums are float32 whatever the cache's dtype.

xla_decode.py attends rows of one token, which are bound by memory. Rows of several tokens are bound by arithmetic:
they are cut into blocks of queries here, with one product per kv head.

Online softmax: Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, split_slots
from jaxserve.ops.paged_attention.ragged import Rows, attend_ragged, query_blocks
from jaxserve.ops.paged_attention.scaled_pages import BITS, Pages, held, numbers, stored
from jaxserve.ops.paged_attention.xla_decode import attend_each_alone, attend_single_tokens
from jaxserve.ops.paged_attention.xla_tiles import (
    Softmax,
    TiledLayer,
    begin,
    first_tile,
    read_tiles,
    sees,
    weigh,
    whole_pages,
)

QUERY_BLOCK = 128  # query tokens of one row per product
QUERY_TILE = 128  # tokens of context per product. 128 x 128: 14.5 ms for two layers of 512 tokens; 64 x 256: 30.6 ms


@dataclass(frozen=True)
class XlaBackend:
    """See the module docstring and `base.Backend`."""

    name: str = "xla"

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        return num_pages, 1 if latent else 2, page_size, num_kv_heads * head_dim

    def scale_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        return self.cache_shape(num_pages, page_size, num_kv_heads, 1, latent=latent)

    def held_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """See `Backend.held_dtype`: bits of bfloat16 and FP8."""
        return BITS.get(dtype, dtype)

    def write(self, cache: Pages, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pages:
        """See `Backend.write`: k and v [T, KH, D], slot_mapping int32 [T]."""
        page, offset = split_slots(slot_mapping, cache.shape[0], cache.shape[2])
        halves = cache.shape[1]  # 1 if V is K, else 2
        half = jnp.arange(halves, dtype=jnp.int32)[None, :]

        def put(pages: jax.Array, new: jax.Array) -> jax.Array:
            """Write the rows new [T, 2, KH, D] into pages [P, 2, page_size, KH * D]."""
            place = pages.at[page[:, None], half, offset[:, None]]
            return place.set(new.reshape(k.shape[0], halves, pages.shape[3]), mode="drop", unique_indices=True)

        return jax.tree.map(put, cache, stored(jnp.stack([k, v][:halves], axis=1), cache.dtype))

    def attend(
        self,
        q: jax.Array,
        cache: Pages,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """See `Backend.attend`: q [T, N, D] -> [T, N, D]."""
        heads, head_dim = q.shape[1:]
        layer = TiledLayer(
            cache, metadata.page_table, spec, sinks, heads, head_dim, whole_pages(QUERY_TILE, cache.shape[2])
        )
        scaled = q.astype(jnp.float32) * spec.scale
        decode = partial(self.decode, layer, alone=metadata.alone)
        extend = partial(self.extend, layer)
        return attend_ragged(scaled, metadata, decode, extend).astype(q.dtype)

    def decode(self, layer: TiledLayer, q: jax.Array, kv_lens: jax.Array, *, alone: bool) -> jax.Array:
        """Attend rows of one token: q float32 [R, N, D], scaled; kv_lens int32 [R] -> float32 [R, N, D].

        A row whose kv_len is 0 gives zeros. alone: batch-invariant, see `AttentionMetadata.alone`.
        """
        return (attend_each_alone if alone else attend_single_tokens)(layer, q, kv_lens)

    def extend(self, layer: TiledLayer, q: jax.Array, rows: Rows) -> jax.Array:
        """Attend the rows of two or more tokens: q float32 [T, N, D], scaled -> float32 [T, N, D].

        Other tokens get numbers that are not read.
        """
        return _attend_blocks(layer, q, rows)

    def export_pages(self, cache: Pages, page_ids: jax.Array, num_kv_heads: int) -> Pages:
        """See `Backend.export_pages`: page_ids int32 [n] -> [n, page_size, 2 * KH, D]."""

        def take(leaf: jax.Array) -> jax.Array:
            """Return the pages of leaf [P, 2, page_size, KH * D] -> [n, page_size, 2 * KH, D]."""
            pages = numbers(leaf.at[page_ids].get(mode="clip"))  # [n, 2 or 1, page_size, KH * D]
            num, halves, page_size, width = pages.shape
            heads = pages.reshape(num, halves, page_size, num_kv_heads, width // num_kv_heads)
            return heads.transpose(0, 2, 3, 1, 4).reshape(num, page_size, halves * num_kv_heads, -1)

        return jax.tree.map(take, cache)

    def import_pages(self, cache: Pages, page_ids: jax.Array, pages: Pages) -> Pages:
        """See `Backend.import_pages`: page_ids int32 [n], pages [n, page_size, 2 * KH, D]."""

        def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
            """Write new [n, page_size, 2 * KH, D] into leaf [P, 2, page_size, KH * D]."""
            num, page_size, rows, head_dim = new.shape
            count = leaf.shape[1]
            halves = new.reshape(num, page_size, rows // count, count, head_dim).transpose(0, 3, 1, 2, 4)
            rows = held(halves.reshape(num, count, page_size, -1), leaf.dtype)
            return leaf.at[page_ids].set(rows, mode="drop")

        return jax.tree.map(put, cache, pages)


def _attend_blocks(layer: TiledLayer, q: jax.Array, rows: Rows) -> jax.Array:
    """Attend the rows of two or more tokens in blocks of at most QUERY_BLOCK tokens: q float32 [T, N, D] -> the same.

    A block that ends after its row writes zeros there. Blocks are written in the order of their tokens, so those
    zeros are overwritten by the next row's block, or not read by `attend_ragged`.
    """
    tokens = q.shape[0]
    block = min(QUERY_BLOCK, tokens)
    blocks = query_blocks(rows, tokens, block, min_tokens=2)
    padded = jnp.pad(q, ((0, block), (0, 0), (0, 0)))

    def attend_block(index: jax.Array, out: jax.Array) -> jax.Array:
        """Write block `index`, an int32 scalar, into out [T + block, N, D]."""
        row, first = blocks.row[index], blocks.first[index]
        token = rows.start[row] + first
        query = lax.dynamic_slice_in_dim(padded, token, block)
        result = _attend_block(layer, query, row, first, rows.q_len[row], rows.kv_len[row])
        return lax.dynamic_update_slice_in_dim(out, result, token, axis=0)

    live = jnp.sum(blocks.live, dtype=jnp.int32)
    return lax.fori_loop(0, live, attend_block, jnp.zeros_like(padded))[:tokens]


def _attend_block(
    layer: TiledLayer, q: jax.Array, row: jax.Array, first: jax.Array, q_len: jax.Array, kv_len: jax.Array
) -> jax.Array:
    """Attend q [B, N, D], the tokens from `first` on of a row of q_len tokens. Zeros after the row's end."""
    block, heads, head_dim = q.shape
    kv_heads = layer.spec.num_kv_heads
    index = first + jnp.arange(block, dtype=jnp.int32)
    position = jnp.where(index < q_len, kv_len - q_len + index, -1)  # [B]; a token at -1 sees nothing
    start, stop = kv_len - q_len + first, jnp.minimum(kv_len, kv_len - q_len + first + block)
    # [KH, B * G, D]: the softmax state has one entry per (kv head, token, query head of the group).
    queries = q.reshape(block, kv_heads, -1, head_dim).swapaxes(0, 1).reshape(kv_heads, -1, head_dim)
    rows = block * heads // kv_heads
    row_position = jnp.tile(jnp.repeat(position, heads // kv_heads), kv_heads)  # [KH * B * G]

    def add_tile(tile: jax.Array, state: Softmax) -> Softmax:
        """Add one tile of context, an int32 scalar, to the softmax over [KH * B * G] rows."""
        column = tile * layer.tile + jnp.arange(layer.tile, dtype=jnp.int32)
        k, v = read_tiles(layer, row, tile, layer.tile, kv_len)
        live = column < kv_len
        if layer.spec.sliding_window is not None:
            live &= column > start - layer.spec.sliding_window
        v = jnp.where(live[:, None], v, 0.0)  # 0 * NaN is NaN: the page may hold another request's NaN
        scores = [jnp.matmul(queries[h], _head(k, h, head_dim).T) for h in range(kv_heads)]
        scores = lax.optimization_barrier(jnp.concatenate(scores))
        seen = sees(layer, column[None, :], row_position[:, None])
        top, total, fade, weights = weigh(layer, state, scores, seen)
        weights = lax.optimization_barrier(weights).reshape(kv_heads, rows, -1)
        values = [jnp.matmul(weights[h], _head(v, h, head_dim)) for h in range(kv_heads)]
        return Softmax(top, total, state.values * fade[:, None] + jnp.concatenate(values))

    state = begin(layer, block, (block * heads, head_dim))
    by_head = state.top.reshape(block, kv_heads, -1).swapaxes(0, 1).reshape(-1)
    state = lax.fori_loop(
        first_tile(layer, start), (stop + layer.tile - 1) // layer.tile, add_tile, state._replace(top=by_head)
    )
    out = state.values / jnp.where(state.total > 0, state.total, 1.0)[:, None]
    return out.reshape(kv_heads, block, -1, head_dim).swapaxes(0, 1).reshape(block, heads, head_dim)


def _head(half: jax.Array, head: int, head_dim: int) -> jax.Array:
    return half[:, head * head_dim : (head + 1) * head_dim]
