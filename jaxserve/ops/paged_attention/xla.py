"""Paged attention in plain XLA, tuned for the CPU; it runs on every platform.

The layout is [P, 2, page_size, KH * D], K first and V second. Loops run over the tiles of a row's context, with bounds
read from data: the time grows with the context and not with the width of the page table, and no context length needs a
new program. A tile is a whole number of pages of one row's context. Scores, softmax and sums are float32 whatever the
cache's dtype.

Rows of one token are bound by memory. All heads of a tile are one matrix product with a block-diagonal query
[N, KH * D]. It has KH times the operations of a product per head, and is still bound by reading the context.
`attend_single_tokens` puts the tiles of all rows into one list and processes it in batches, so that one long row uses
every core as many short rows do. Each tile is a softmax of its own; the tiles of a batch are merged into their rows by
log-sum-exp. `attend_each_alone` processes row by row: it is batch-invariant, for deterministic mode.

Rows of several tokens are bound by arithmetic: they are cut into blocks of queries, with one product per kv head.

Online softmax: Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.ops.paged_attention.base import MASKED, AttentionMetadata, AttentionSpec, split_slots
from jaxserve.ops.paged_attention.ragged import Rows, attend_ragged, query_blocks
from jaxserve.ops.paged_attention.scaled_pages import BITS, Pages, held, numbers, stored


class TiledLayer(NamedTuple):
    """The loop-invariant inputs of one layer's attention."""

    cache: Pages  # [P, 2, page_size, KH * D], or [P, 1, ...] if V is K
    page_table: jax.Array  # [R, max_pages]
    spec: AttentionSpec
    sinks: jax.Array | None  # [N]
    num_heads: int
    head_dim: int
    tile: int  # tokens of context in one product, a whole number of pages


class Softmax(NamedTuple):
    """An online softmax over M query rows: running maximum [M], denominator [M], weighted sum of values [M, ...]."""

    top: jax.Array
    total: jax.Array
    values: jax.Array


def whole_pages(tokens: int, page_size: int) -> int:
    """Round `tokens` down to a whole number of pages, at least one page."""
    return max(1, tokens // page_size) * page_size


def read_tiles(
    layer: TiledLayer, row: jax.Array, tile: jax.Array, size: int, kv_len: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Read K and V of the first `size` tokens of each tile -> two float32 [*S, size, KH * D].

    row, tile and kv_len: int32 [*S]. Pages after the context are not read: the last page of the context is read
    again in their place, and the caller masks it.
    """
    num_pages, count, page_size, _ = layer.cache.shape
    page = jnp.arange(size // page_size, dtype=jnp.int32).reshape((1,) * tile.ndim + (-1,))
    column = tile[..., None] * (layer.tile // page_size) + page
    pages = layer.page_table[row[..., None], jnp.minimum(column, ((kv_len - 1) // page_size)[..., None])]

    def half(index: int) -> jax.Array:
        """Return K (0) or V (1) of the pages as float32 [*S, size, KH * D]."""

        def take(leaf: jax.Array) -> jax.Array:
            """Return this half of the pages of leaf [P, 2, page_size, KH * D] -> [*S, size, KH * D]."""
            halves = leaf.reshape(count * num_pages, page_size, leaf.shape[3])
            taken = numbers(halves.at[count * pages + index].get(mode="clip"))
            return taken.reshape(*tile.shape, size, leaf.shape[3])

        return jax.tree.map(take, layer.cache).astype(jnp.float32)

    k = half(0)
    return k, half(1) if count == 2 else k


def first_tile(layer: TiledLayer, position: jax.Array) -> jax.Array:
    """Return the first tile that a query at `position` sees, int32 [*S]; position int32 [*S]."""
    if layer.spec.sees_all:
        return jnp.zeros_like(position)
    return layer.spec.oldest(position) // layer.tile


def sees(layer: TiledLayer, column: jax.Array, position: jax.Array) -> jax.Array:
    """Return whether the query at `position` sees the token at `column`, int32 [*S] each -> bool [*S]."""
    seen = column <= position
    if not layer.spec.sees_all:
        seen &= layer.spec.reaches(column, position)
    return seen


def begin(layer: TiledLayer, tokens: int, values_shape: tuple[int, ...]) -> Softmax:
    """Return the softmax before any tile. Sinks are already in it: each is a score whose value is zero."""
    rows = tokens * layer.num_heads
    if layer.sinks is None:
        top, total = jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32)
    else:
        top, total = jnp.tile(layer.sinks.astype(jnp.float32), tokens), jnp.ones((rows,), jnp.float32)
    return Softmax(top, total, jnp.zeros(values_shape, jnp.float32))


def capped(layer: TiledLayer, scores: jax.Array) -> jax.Array:
    """Apply the layer's soft cap, if it has one, to float32 scores [...]."""
    cap = layer.spec.soft_cap
    return scores if cap is None else jnp.tanh(scores / cap) * cap


def weigh(
    layer: TiledLayer, state: Softmax, scores: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Add scores float32 [M, tile] to the softmax; seen bool [M, tile].

    Returns the new maximum [M], the new denominator [M], the factor for the old values [M], the weights [M, tile].
    """
    scores = jnp.where(seen, capped(layer, scores), MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
    fade = jnp.exp(state.top - top)
    return top, state.total * fade + jnp.sum(weights, axis=1), fade, weights


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
    """The queries [R, ...] of all rows, and one list of the tiles that they see, row after row. Others are int32 [R].

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
        """Return the dtype of the stored array: unsigned integers for the bits of bfloat16 and FP8."""
        return BITS.get(dtype, dtype)

    def write(self, cache: Pages, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pages:
        """Write k and v [T, KH, D] at slot_mapping int32 [T], see `Backend.write`."""
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
        """Attend q [T, N, D] -> [T, N, D], see `Backend.attend`."""
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

        Other tokens get values that are not read.
        """
        return _attend_blocks(layer, q, rows)

    def export_pages(self, cache: Pages, page_ids: jax.Array, num_kv_heads: int) -> Pages:
        """Return pages page_ids int32 [n] -> [n, page_size, 2 * KH, D], see `Backend.export_pages`."""

        def take(leaf: jax.Array) -> jax.Array:
            """Return the pages of leaf [P, 2, page_size, KH * D] -> [n, page_size, 2 * KH, D]."""
            pages = numbers(leaf.at[page_ids].get(mode="clip"))  # [n, 2 or 1, page_size, KH * D]
            num, halves, page_size, width = pages.shape
            heads = pages.reshape(num, halves, page_size, num_kv_heads, width // num_kv_heads)
            return heads.transpose(0, 2, 3, 1, 4).reshape(num, page_size, halves * num_kv_heads, -1)

        return jax.tree.map(take, cache)

    def import_pages(self, cache: Pages, page_ids: jax.Array, pages: Pages) -> Pages:
        """Write pages [n, page_size, 2 * KH, D] at page_ids int32 [n], see `Backend.import_pages`."""

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
        if not layer.spec.sees_all:
            live &= layer.spec.reaches(column, start)
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
