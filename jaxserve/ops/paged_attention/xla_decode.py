"""Attention of rows with one token each, in plain XLA.

All heads of a tile are one matrix product with a block-diagonal query [N, KH * D]. That is KH times the operations of
a product per head, and still bound by reading the context from memory.

`attend_single_tokens` puts the tiles of all rows into one list and processes it in batches, so that one long row uses
every core as many short rows do. Each tile is a softmax of its own; the tiles of a batch are merged into their rows by
log-sum-exp. `attend_each_alone` processes row by row: it is batch-invariant, for deterministic mode.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.ops.paged_attention.base import MASKED
from jaxserve.ops.paged_attention.xla_tiles import (
    Softmax,
    TiledLayer,
    begin,
    capped,
    first_tile,
    read_tiles,
    sees,
    weigh,
    whole_pages,
)

CONTEXT_TILE = 64  # tokens of context per product
# Tiles per batch, and per batch once fewer are left. 32 rows take 24 ms with 16 tiles, 41 ms with 8, 33 ms with 32.
MANY_TILES, FEW_TILES = 16, 4
# `attend_each_alone`: tokens per product, and tokens of the last product if no more than these are left.
ALONE_TILE, ALONE_SHORT = 256, 64


def attend_single_tokens(layer: TiledLayer, q: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """Attend q float32 [R, N, D], one token per row at position kv_len - 1 -> float32 [R, N, D].

    kv_lens: int32 [R]. A row whose kv_len is 0 gives zeros.
    """
    rows, heads, head_dim = q.shape
    layer = layer._replace(tile=whole_pages(CONTEXT_TILE, layer.cache.shape[2]))
    queries = _block_diagonal(q, layer.spec.num_kv_heads)
    work = _work_list(layer, queries, kv_lens)
    num_tiles = work.ends[-1]

    def add(state: tuple[jax.Array, Softmax]) -> tuple[jax.Array, Softmax]:
        """Add the next batch of tiles. state: number of tiles done, int32 [], and the softmax of all rows."""
        done, softmax = state
        many = num_tiles - done > MANY_TILES - FEW_TILES
        batches = [partial(_add_tiles, layer, work, size) for size in (MANY_TILES, FEW_TILES)]
        return done + jnp.where(many, MANY_TILES, FEW_TILES), lax.cond(many, *batches, done, softmax)

    padded = rows + MANY_TILES
    top, total, values = begin(layer, padded, (padded, heads, head_dim))
    state = Softmax(top.reshape(padded, heads), total.reshape(padded, heads), values)
    none = jnp.zeros((), jnp.int32)
    _, state = lax.while_loop(lambda state: state[0] < num_tiles, add, (none, state))
    out = state.values / jnp.where(state.total == 0, 1.0, state.total)[:, :, None]
    return jnp.where((kv_lens > 0)[:, None, None], out[work.rank], 0.0)


class _Work(NamedTuple):
    """The queries [R, ...] of all rows, and one list of the tiles that they meet, row after row. Others are int32 [R].

    Entry i belongs to the first row whose `ends` is above i. It is that row's tile i + shift.
    rank: index of the row among the rows that have a context.
    """

    queries: jax.Array
    kv_lens: jax.Array
    ends: jax.Array
    shift: jax.Array
    rank: jax.Array


def _work_list(layer: TiledLayer, queries: jax.Array, kv_lens: jax.Array) -> _Work:
    first = first_tile(layer, kv_lens - 1)
    count = jnp.where(kv_lens > 0, (kv_lens + layer.tile - 1) // layer.tile - first, 0)
    ends = jnp.cumsum(count)
    rank = jnp.cumsum((kv_lens > 0).astype(jnp.int32)) - 1
    return _Work(queries, kv_lens, ends, first - (ends - count), jnp.maximum(rank, 0))


def _add_tiles(layer: TiledLayer, work: _Work, size: int, done: jax.Array, state: Softmax) -> Softmax:
    """Return the softmax of all rows, by rank, with the list's entries [done, done + size) added."""
    place = done + jnp.arange(size, dtype=jnp.int32)
    live = place < work.ends[-1]
    place = jnp.minimum(place, work.ends[-1] - 1)
    row = jnp.sum(work.ends[None, :] <= place[:, None], axis=1, dtype=jnp.int32)
    kv_len, tile = work.kv_lens[row], place + work.shift[row]
    column = tile[:, None] * layer.tile + jnp.arange(layer.tile, dtype=jnp.int32)[None, :]
    seen = sees(layer, column, kv_len[:, None] - 1) & live[:, None]
    own = _attend_tiles(layer, work.queries[row], seen, read_tiles(layer, row, tile, layer.tile, kv_len))
    # Tiles are in the order of their rows, so a batch touches at most `size` rows, from the first tile's row on.
    first = work.rank[row[0]]
    touched = Softmax(*(lax.dynamic_slice_in_dim(part, first, size) for part in state))
    merged = _merge(touched, own, work.rank[row] - first, live)
    pairs = zip(state, merged, strict=True)
    return Softmax(*(lax.dynamic_update_slice_in_dim(part, new, first, axis=0) for part, new in pairs))


def _attend_tiles(layer: TiledLayer, queries: jax.Array, seen: jax.Array, kv: tuple[jax.Array, jax.Array]) -> Softmax:
    """Compute each tile's softmax over its own tokens.

    queries [W, N, KH * D], seen bool [W, tile], K and V [W, tile, KH * D].
    """
    k, v = kv
    # The barriers keep XLA from fusing the products with the softmax: a fused product is not the fast matrix kernel.
    scores = lax.optimization_barrier(jnp.einsum("wnd,wtd->wnt", queries, k))
    scores = jnp.where(seen[:, None, :], capped(layer, scores), MASKED)
    top = jnp.max(scores, axis=2)
    weights = jnp.where(seen[:, None, :], jnp.exp(scores - top[:, :, None]), 0.0)
    v = jnp.where(seen[:, :, None], v, 0.0)  # 0 * NaN is NaN: the page may hold another request's NaN
    values = jnp.einsum("wnt,wtd->wnd", lax.optimization_barrier(weights), v)
    return Softmax(top, jnp.sum(weights, axis=2), _diagonal_blocks(values, layer.spec.num_kv_heads))


def _merge(rows: Softmax, tiles: Softmax, row_of: jax.Array, live: jax.Array) -> Softmax:
    """Add each live tile [W, ...] to its row [W, ...]. One matrix product sums the tiles of all rows.

    A tile that is not finite makes its own row NaN. It is kept out of the product so that other rows stay finite.
    """
    size = row_of.shape[0]
    mine = (row_of[None, :] == jnp.arange(size, dtype=jnp.int32)[:, None]) & live[None, :]  # [row, tile]
    top = jnp.maximum(rows.top, jnp.max(jnp.where(mine[:, :, None], tiles.top[None], MASKED), axis=1))
    fade = jnp.exp(rows.top - top)
    scale = jnp.where(live[:, None], jnp.exp(tiles.top - top[row_of]), 0.0)
    added = jnp.concatenate([(tiles.total * scale)[:, :, None], tiles.values * scale[:, :, None]], axis=2)
    finite = jnp.all(jnp.isfinite(added), axis=(1, 2))
    added = jnp.where(finite[:, None, None], added, 0.0).reshape(size, -1)
    spoiled = jnp.any(mine & ~finite[None, :], axis=1)
    sums = (mine.astype(jnp.float32) @ added).reshape(size, *tiles.top.shape[1:], -1)
    total = jnp.where(spoiled[:, None], jnp.nan, rows.total * fade + sums[:, :, 0])
    return Softmax(top, total, rows.values * fade[:, :, None] + sums[:, :, 1:])


def attend_each_alone(layer: TiledLayer, q: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """Do `attend_single_tokens` in a loop over the rows, so that no row's sums depend on the other rows.

    q: float32 [R, N, D]; kv_lens: int32 [R] -> float32 [R, N, D].
    """
    live = jnp.flatnonzero(kv_lens > 0, size=q.shape[0], fill_value=0).astype(jnp.int32)
    queries = _block_diagonal(q, layer.spec.num_kv_heads)
    layer = layer._replace(tile=whole_pages(ALONE_TILE, layer.cache.shape[2]))
    short = whole_pages(ALONE_SHORT, layer.cache.shape[2])

    def attend_row(index: jax.Array, out: jax.Array) -> jax.Array:
        """Write the `index`-th live row into out [R, N, KH * D]."""
        row = live[index]
        query, kv_len = queries[row], kv_lens[row]

        def add(size: int, tile: jax.Array, state: Softmax) -> Softmax:
            """Add the first `size` tokens of a tile, an int32 scalar, to the softmax over [N] heads."""
            column = tile * layer.tile + jnp.arange(size, dtype=jnp.int32)
            seen = sees(layer, column, kv_len - 1)
            k, v = read_tiles(layer, row, tile, size, kv_len)
            # Barriers as in `_attend_tiles`.
            scores = lax.optimization_barrier(jnp.matmul(query, k.T))
            top, total, fade, weights = weigh(layer, state, scores, seen[None, :])
            weights = lax.optimization_barrier(weights)
            v = jnp.where(seen[:, None], v, 0.0)  # 0 * NaN is NaN: the page may hold another request's NaN
            return Softmax(top, total, state.values * fade[:, None] + jnp.matmul(weights, v))

        def add_tile(tile: jax.Array, state: Softmax) -> Softmax:
            """Add a tile, an int32 scalar, to the softmax over [N] heads; a short last tile takes a smaller product."""
            rest = kv_len - tile * layer.tile
            return lax.cond(rest > short, partial(add, layer.tile), partial(add, short), tile, state)

        last = (kv_len + layer.tile - 1) // layer.tile
        state = lax.fori_loop(first_tile(layer, kv_len - 1), last, add_tile, begin(layer, 1, query.shape))
        return out.at[row].set(state.values / jnp.where(state.total > 0, state.total, 1.0)[:, None])

    out = lax.fori_loop(0, jnp.sum(kv_lens > 0, dtype=jnp.int32), attend_row, jnp.zeros_like(queries))
    return _diagonal_blocks(out, layer.spec.num_kv_heads)


def _block_diagonal(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Spread q [R, N, D] to [R, N, KH * D]: each head's query in the columns of its kv head, zeros elsewhere."""
    rows, heads, head_dim = q.shape
    own = jnp.eye(num_kv_heads, dtype=q.dtype)[None, :, None, :, None]
    return (q.reshape(rows, num_kv_heads, -1, 1, head_dim) * own).reshape(rows, heads, -1)


def _diagonal_blocks(out: jax.Array, num_kv_heads: int) -> jax.Array:
    """Undo `_block_diagonal`: take each head's own columns of [R, N, KH * D] -> [R, N, D]."""
    rows, heads, width = out.shape
    blocks = out.reshape(rows, num_kv_heads, heads // num_kv_heads, num_kv_heads, width // num_kv_heads)
    own = [blocks[:, head, :, head] for head in range(num_kv_heads)]
    return jnp.stack(own, axis=1).reshape(rows, heads, -1)
