"""Paged attention in plain XLA, formed for the CPU; it runs anywhere.

Owns the layout [P, 2, page_size, KH * D] (K half, V half) and two loops over the live tiles of a row's context, both
with bounds that are data: the time grows with the live context and never with the width of the page table, which is
therefore no reason to compile anew. Scores, softmax and sums are float32 whatever the cache holds.

Rows with one token take all heads of a tile in one matrix product against a block-diagonal query [N, KH * D]: KH
times the operations of a product per head, and still bound by memory. Rows with more tokens are cut into blocks of
queries and take one product per kv head, where operations count.

Online softmax: Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, split_slots
from jaxserve.ops.paged_attention.ragged import Rows, attend_ragged, query_blocks

TILE = 256  # tokens of context in one product: at 64 the loop's own cost shows (+35 %), 512 gains nothing
SHORT_TILE = 64  # the same for a rest of at most so many tokens: halves the time of 32 rows of 48 tokens
QUERY_BLOCK = 128  # query tokens of one row in one product, and the tokens of context that they meet in it:
QUERY_TILE = 128  # 14.5 ms for two layers of 512 tokens; 30.6 with 64 by 256
MASKED = -1e30  # finite: the difference of two masked scores is 0 and not NaN


@dataclass(frozen=True)
class XlaBackend:
    """See the file's docstring and `base.Backend`."""

    name: str = "xla"

    def cache_shape(self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_pages, 2, page_size, num_kv_heads * head_dim

    def write(self, cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        page, offset = split_slots(slot_mapping, cache.shape[0], cache.shape[2])
        rows = jnp.stack([k, v], axis=1).reshape(k.shape[0], 2, cache.shape[3]).astype(cache.dtype)
        half = jnp.arange(2, dtype=jnp.int32)[None, :]
        return cache.at[page[:, None], half, offset[:, None]].set(rows, mode="drop", unique_indices=True)

    def attend(
        self,
        q: jax.Array,
        cache: jax.Array,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        heads, head_dim = q.shape[1:]
        tile = _whole_pages(TILE, cache.shape[2])
        layer = _Layer(cache, metadata.page_table, spec, sinks, heads, head_dim, tile)
        scaled = q.astype(jnp.float32) * spec.scale
        decode, extend = partial(_attend_single_tokens, layer), partial(_attend_blocks, layer)
        return attend_ragged(scaled, metadata, decode, extend).astype(q.dtype)

    def export_pages(self, cache: jax.Array, page_ids: jax.Array, num_kv_heads: int) -> jax.Array:
        pages = cache.at[page_ids].get(mode="clip")  # [n, 2, page_size, KH * D]
        num, _, page_size, width = pages.shape
        heads = pages.reshape(num, 2, page_size, num_kv_heads, width // num_kv_heads)
        return heads.transpose(0, 2, 3, 1, 4).reshape(num, page_size, 2 * num_kv_heads, -1)

    def import_pages(self, cache: jax.Array, page_ids: jax.Array, pages: jax.Array) -> jax.Array:
        num, page_size, rows, head_dim = pages.shape
        halves = pages.reshape(num, page_size, rows // 2, 2, head_dim).transpose(0, 3, 1, 2, 4)
        return cache.at[page_ids].set(halves.reshape(num, 2, page_size, -1).astype(cache.dtype), mode="drop")


class _Layer(NamedTuple):
    """What does not change over the loops of one layer's attention."""

    cache: jax.Array  # [P, 2, page_size, KH * D]
    page_table: jax.Array  # [R, max_pages]
    spec: AttentionSpec
    sinks: jax.Array | None  # [N]
    num_heads: int
    head_dim: int
    tile: int  # tokens of context in one step of the loop, a whole number of pages


class _Softmax(NamedTuple):
    """A softmax in progress over M query rows: running maximum [M], denominator [M], weighted values [M, ...]."""

    top: jax.Array
    total: jax.Array
    values: jax.Array


def _whole_pages(tokens: int, page_size: int) -> int:
    """`tokens` rounded down to a whole number of pages, at least one."""
    return max(1, tokens // page_size) * page_size


def _read_tile(
    layer: _Layer, row: jax.Array, tile: jax.Array, size: int, kv_len: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """K and V of the first `size` tokens of a tile, each float32 [size, KH * D].

    Pages behind the context are not read: the last live one stands in for them.
    """
    num_pages, _, page_size, width = layer.cache.shape
    column = tile * (layer.tile // page_size) + jnp.arange(size // page_size, dtype=jnp.int32)
    pages = layer.page_table[row, jnp.minimum(column, (kv_len - 1) // page_size)]
    halves = layer.cache.reshape(2 * num_pages, page_size, width)
    k = halves.at[2 * pages].get(mode="clip").reshape(size, width)
    v = halves.at[2 * pages + 1].get(mode="clip").reshape(size, width)
    return k.astype(jnp.float32), v.astype(jnp.float32)


def _first_tile(layer: _Layer, position: jax.Array) -> jax.Array:
    """The first tile that a query at `position` sees."""
    if layer.spec.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - layer.spec.sliding_window + 1, 0) // layer.tile


def _seen(layer: _Layer, column: jax.Array, position: jax.Array) -> jax.Array:
    """Whether the query at `position` sees the token at `column`."""
    seen = column <= position
    if layer.spec.sliding_window is not None:
        seen &= column > position - layer.spec.sliding_window
    return seen


def _start(layer: _Layer, tokens: int, values_shape: tuple[int, ...]) -> _Softmax:
    """Nothing seen yet, but the sinks: a sink is a score whose value is zero."""
    rows = tokens * layer.num_heads
    if layer.sinks is None:
        top, total = jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32)
    else:
        top, total = jnp.tile(layer.sinks.astype(jnp.float32), tokens), jnp.ones((rows,), jnp.float32)
    return _Softmax(top, total, jnp.zeros(values_shape, jnp.float32))


def _weigh(
    layer: _Layer, state: _Softmax, scores: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """New maximum, new denominator, the factor that ages the old values [M] and the weights [M, tile]."""
    if layer.spec.soft_cap is not None:
        scores = jnp.tanh(scores / layer.spec.soft_cap) * layer.spec.soft_cap
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
    fade = jnp.exp(state.top - top)
    return top, state.total * fade + jnp.sum(weights, axis=1), fade, weights


def _attend_single_tokens(layer: _Layer, q: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """q float32 [R, N, D], one token at position kv_len - 1 of each row; zeros where kv_len is 0."""
    live = jnp.flatnonzero(kv_lens > 0, size=q.shape[0], fill_value=0).astype(jnp.int32)
    queries = _block_diagonal(q, layer.spec.num_kv_heads)
    short = _whole_pages(SHORT_TILE, layer.cache.shape[2])

    def attend_row(index: jax.Array, out: jax.Array) -> jax.Array:
        row = live[index]
        query, kv_len = queries[row], kv_lens[row]

        def add(size: int, tile: jax.Array, state: _Softmax) -> _Softmax:
            column = tile * layer.tile + jnp.arange(size, dtype=jnp.int32)
            seen = _seen(layer, column, kv_len - 1)
            k, v = _read_tile(layer, row, tile, size, kv_len)
            # The barriers keep the products apart from the softmax: fused, they lose the matrix kernel.
            scores = lax.optimization_barrier(jnp.matmul(query, k.T))
            top, total, fade, weights = _weigh(layer, state, scores, seen[None, :])
            weights = lax.optimization_barrier(weights)
            v = jnp.where(seen[:, None], v, 0.0)  # 0 * NaN: what another request left there must not count
            return _Softmax(top, total, state.values * fade[:, None] + jnp.matmul(weights, v))

        def add_tile(tile: jax.Array, state: _Softmax) -> _Softmax:
            rest = kv_len - tile * layer.tile
            return lax.cond(rest > short, partial(add, layer.tile), partial(add, short), tile, state)

        last = (kv_len + layer.tile - 1) // layer.tile
        state = lax.fori_loop(_first_tile(layer, kv_len - 1), last, add_tile, _start(layer, 1, query.shape))
        return out.at[row].set(state.values / jnp.where(state.total > 0, state.total, 1.0)[:, None])

    out = lax.fori_loop(0, jnp.sum(kv_lens > 0, dtype=jnp.int32), attend_row, jnp.zeros_like(queries))
    return _diagonal_blocks(out, layer.spec.num_kv_heads)


def _block_diagonal(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[R, N, D] -> [R, N, KH * D]: each head's query in the columns of its kv head, zeros elsewhere."""
    rows, heads, head_dim = q.shape
    own = jnp.eye(num_kv_heads, dtype=q.dtype)[None, :, None, :, None]
    return (q.reshape(rows, num_kv_heads, -1, 1, head_dim) * own).reshape(rows, heads, -1)


def _diagonal_blocks(out: jax.Array, num_kv_heads: int) -> jax.Array:
    """[R, N, KH * D] -> [R, N, D]: each head's own columns."""
    rows, heads, width = out.shape
    blocks = out.reshape(rows, num_kv_heads, heads // num_kv_heads, num_kv_heads, width // num_kv_heads)
    own = [blocks[:, head, :, head] for head in range(num_kv_heads)]
    return jnp.stack(own, axis=1).reshape(rows, heads, -1)


def _attend_blocks(layer: _Layer, q: jax.Array, rows: Rows) -> jax.Array:
    """q float32 [T, N, D]: attention of the rows with two tokens and more, in blocks of at most QUERY_BLOCK tokens.

    Blocks come in the order of their tokens, so that what a block writes behind its row (zeros) is written over by
    the row it belongs to, or by attend_ragged.
    """
    tokens = q.shape[0]
    block = min(QUERY_BLOCK, tokens)
    layer = layer._replace(tile=_whole_pages(QUERY_TILE, layer.cache.shape[2]))
    blocks = query_blocks(rows, tokens, block, min_tokens=2)
    padded = jnp.pad(q, ((0, block), (0, 0), (0, 0)))

    def attend_block(index: jax.Array, out: jax.Array) -> jax.Array:
        row, first = blocks.row[index], blocks.first[index]
        token = rows.start[row] + first
        query = lax.dynamic_slice_in_dim(padded, token, block)
        result = _attend_block(layer, query, row, first, rows.q_len[row], rows.kv_len[row])
        return lax.dynamic_update_slice_in_dim(out, result, token, axis=0)

    live = jnp.sum(blocks.live, dtype=jnp.int32)
    return lax.fori_loop(0, live, attend_block, jnp.zeros_like(padded))[:tokens]


def _attend_block(
    layer: _Layer, q: jax.Array, row: jax.Array, first: jax.Array, q_len: jax.Array, kv_len: jax.Array
) -> jax.Array:
    """q [B, N, D], tokens first.. of a row of q_len tokens; zeros behind the row's end."""
    block, heads, head_dim = q.shape
    kv_heads = layer.spec.num_kv_heads
    index = first + jnp.arange(block, dtype=jnp.int32)
    position = jnp.where(index < q_len, kv_len - q_len + index, -1)  # [B]; -1 sees nothing
    start, stop = kv_len - q_len + first, jnp.minimum(kv_len, kv_len - q_len + first + block)
    # [KH, B * G, D]: the softmax state runs over (kv head, token, head of its group).
    queries = q.reshape(block, kv_heads, -1, head_dim).swapaxes(0, 1).reshape(kv_heads, -1, head_dim)
    rows = block * heads // kv_heads
    row_position = jnp.tile(jnp.repeat(position, heads // kv_heads), kv_heads)  # [KH * B * G]

    def add_tile(tile: jax.Array, state: _Softmax) -> _Softmax:
        column = tile * layer.tile + jnp.arange(layer.tile, dtype=jnp.int32)
        k, v = _read_tile(layer, row, tile, layer.tile, kv_len)
        v = jnp.where((column < kv_len)[:, None], v, 0.0)
        scores = [jnp.matmul(queries[h], _head(k, h, head_dim).T) for h in range(kv_heads)]
        scores = lax.optimization_barrier(jnp.concatenate(scores))
        seen = _seen(layer, column[None, :], row_position[:, None])
        top, total, fade, weights = _weigh(layer, state, scores, seen)
        weights = lax.optimization_barrier(weights).reshape(kv_heads, rows, -1)
        values = [jnp.matmul(weights[h], _head(v, h, head_dim)) for h in range(kv_heads)]
        return _Softmax(top, total, state.values * fade[:, None] + jnp.concatenate(values))

    begin = _start(layer, block, (block * heads, head_dim))
    by_head = begin.top.reshape(block, kv_heads, -1).swapaxes(0, 1).reshape(-1)
    state = lax.fori_loop(
        _first_tile(layer, start), (stop + layer.tile - 1) // layer.tile, add_tile, begin._replace(top=by_head)
    )
    out = state.values / jnp.where(state.total > 0, state.total, 1.0)[:, None]
    return out.reshape(kv_heads, block, -1, head_dim).swapaxes(0, 1).reshape(block, heads, head_dim)


def _head(half: jax.Array, head: int, head_dim: int) -> jax.Array:
    return half[:, head * head_dim : (head + 1) * head_dim]
