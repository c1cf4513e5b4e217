"""Paged attention for TPUs in Pallas. Has not run on a TPU yet, only in Pallas' interpreter.

There is one kernel. In its layout [P, 2, KH, page_size, D], K or V of one head fills whole register tiles of a page. K
and V of heads of 64 columns are one row, [P, 1, KH, page_size, 128]: XLA keeps an array of 64 columns in another order
than the kernel reads, and would copy all of it.

The grid runs over blocks of queries: one token of a row in decode, else up to `rows` rows of a product. Their positions
are prefetched scalars, and so is one row of the page table at a time: 512 rows of 16,384 tokens have 2 MB, and scalars
1 MB. Pages are copied from HBM into two alternating buffers, the next tile while this one is multiplied. The softmax is
float32 (FlashAttention-2, arXiv 2307.08691). XLA's scatter writes K and V one row at a time: slow for long prefills.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.errors import ConfigError
from jaxserve.ops.paged_attention.base import MASKED, AttentionMetadata, AttentionSpec, split_slots
from jaxserve.ops.paged_attention.ragged import (
    QueryBlocks,
    Rows,
    attend_ragged,
    query_blocks,
)
from jaxserve.ops.paged_attention.scaled_pages import Pages, stored

LANES = 128  # columns of a vector register


@dataclass(frozen=True)
class TpuTuning:
    """Sizes of the kernel's blocks.

    tile: tokens of context per tile. rows: query tokens times heads of a group in a prefill block's product.
    """

    tile: int = 256
    rows: int = 128


@dataclass(frozen=True)
class TpuBackend:
    """See the module docstring. interpret: run the kernel in Pallas' interpreter, slowly, on any device."""

    name: str = "tpu"
    tuning: TpuTuning = TpuTuning()
    interpret: bool = False

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        """Return the shape. Raises ConfigError for latent rows that would look like K and V in one row."""
        if latent and head_dim == LANES:
            raise ConfigError(
                f"the TPU's kernel has no latent rows of {LANES} numbers", fix="use runtime.attention: xla"
            )
        if 2 * head_dim == LANES and not latent:
            return num_pages, 1, num_kv_heads, page_size, LANES
        return num_pages, 1 if latent else 2, num_kv_heads, page_size, head_dim

    def scale_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        return num_pages, 1 if latent else 2, num_kv_heads, 1, page_size

    def held_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """Return the dtype of the stored array, see `Backend.held_dtype`."""
        return dtype

    def write(self, cache: Pages, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pages:
        """Write k and v [T, KH, D] at slot_mapping int32 [T], see `Backend.write`."""
        page, offset = split_slots(slot_mapping, cache.shape[0], cache.shape[3])
        joined = _is_joined(cache)
        rows = stored(jnp.stack([k, v][: 2 if joined else cache.shape[1]], axis=1), cache.dtype)  # [T, 2, KH, D]
        (values, *scales), (new, *factors) = jax.tree.leaves(cache), jax.tree.leaves(rows)
        new = _joined(new) if joined else new
        options: Any = {"mode": "drop", "unique_indices": True}
        if 1 in values.shape[1:3]:
            written = [_with_rows(values, page, offset, new)]
        else:
            written = [values.at[page, :, :, offset].set(new, **options)]
        for leaf, factor in zip(scales, factors, strict=True):
            written.append(leaf.at[page, :, :, 0, offset].set(factor[..., 0], **options))
        return jax.tree.unflatten(jax.tree.structure(cache), written)

    def attend(
        self,
        q: jax.Array,
        cache: Pages,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attend q [T, N, D] -> [T, N, D], see `Backend.attend`."""
        layer = _Layer(cache, metadata.page_table, spec, sinks, self.tuning, self.interpret)
        attend = functools.partial(
            attend_ragged,
            metadata=metadata,
            decode=functools.partial(_attend_last_tokens, layer),
            extend=functools.partial(_attend_long_rows, layer),
        )
        if not _is_joined(cache):
            return attend(q)
        # In the scores the columns of V are multiplied by zeros. The result has weighted columns of K first.
        columns = q.shape[-1]
        return attend(jnp.pad(q, ((0, 0), (0, 0), (0, columns))))[..., columns:]

    def export_pages(self, cache: Pages, page_ids: jax.Array, num_kv_heads: int) -> Pages:
        """Return pages page_ids int32 [n] -> [n, page_size, 2 * KH, D], see `Backend.export_pages`."""
        size = cache.shape[3]

        def take(leaf: jax.Array) -> jax.Array:
            """Return the pages of leaf [P, 2, KH, page_size, D] -> [n, page_size, 2 * KH, D]."""
            pages = leaf.at[page_ids].get(mode="clip")  # [n, 2, KH, page_size, D]
            pages = pages if pages.shape[3] == size else pages.swapaxes(3, 4)
            pages = _split(pages) if _is_joined(pages) else pages
            num, kept, _, page_size, head_dim = pages.shape
            return pages.transpose(0, 3, 2, 1, 4).reshape(num, page_size, kept * num_kv_heads, head_dim)

        return jax.tree.map(take, cache)

    def import_pages(self, cache: Pages, page_ids: jax.Array, pages: Pages) -> Pages:
        """Write pages [n, page_size, 2 * KH, D] at page_ids int32 [n], see `Backend.import_pages`."""

        def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
            """Write new [n, page_size, 2 * KH, D] into leaf [P, 2, KH, page_size, D]."""
            num, page_size, rows, head_dim = new.shape
            kv_heads = leaf.shape[2]
            parts = new.reshape(num, page_size, kv_heads, rows // kv_heads, head_dim).transpose(0, 3, 2, 1, 4)
            parts = parts if leaf.shape[3] == page_size else parts.swapaxes(3, 4)
            parts = _joined(parts) if parts.shape[1] > leaf.shape[1] else parts
            return leaf.at[page_ids].set(parts.astype(leaf.dtype), mode="drop")

        return jax.tree.map(put, cache, pages)


def _is_joined(pages: Pages) -> bool:
    """Return whether K and V of a token are one row of pages [P, 1, KH, page_size, 2 * D]."""
    return pages.shape[1] == 1 and pages.shape[-1] == LANES


def _joined(halves: jax.Array) -> jax.Array:
    """Join K and V [n, 2, ..., D] to rows [n, 1, ..., 2 * D]."""
    return jnp.concatenate([halves[:, :1], halves[:, 1:]], axis=-1)


def _split(rows: jax.Array) -> jax.Array:
    """Split rows [n, 1, ..., 2 * D] into K and V [n, 2, ..., D]."""
    return jnp.concatenate(jnp.split(rows, 2, axis=-1), axis=1)


def _with_rows(pages: jax.Array, page: jax.Array, offset: jax.Array, rows: jax.Array) -> jax.Array:
    """Return pages [P, kept, KH, page_size, D] with rows [T, kept, KH, D] at page and offset int32 [T].

    They are written as rows, as they are in memory: XLA would copy all pages, and back, for an array with an axis of 1.
    """
    _, kept, kv_heads, page_size, head_dim = pages.shape
    part = jnp.arange(kept * kv_heads, dtype=jnp.int32)[None]
    place = (page[:, None] * (kept * kv_heads) + part) * page_size + offset[:, None]
    flat, new = pages.reshape(-1, head_dim), rows.reshape(-1, head_dim)
    return flat.at[place.reshape(-1)].set(new, mode="drop", unique_indices=True).reshape(pages.shape)


class _Layer(NamedTuple):
    cache: Pages  # [P, 2, KH, page_size, D], or [P, 1, ...] if V is K or joined to it
    page_table: jax.Array  # int32 [R, max_pages]
    spec: AttentionSpec
    sinks: jax.Array | None  # [N]
    tuning: TpuTuning
    interpret: bool


class _QueryBlocks(NamedTuple):
    """The row and position of each of B blocks of queries, int32 [B]. Prefetched scalars of the kernel."""

    row: jax.Array
    position: jax.Array  # of the block's first query
    end: jax.Array  # context length that its last query sees; 0: an unused block


def _attend_last_tokens(layer: _Layer, q: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """Attend q [R, N, D], the token at kv_len - 1 of each row -> [R, N, D]. Zeros if kv_len is 0."""
    rows, heads, head_dim = q.shape
    blocks = _QueryBlocks(jnp.arange(rows, dtype=jnp.int32), kv_lens - 1, kv_lens)
    grouped = q.reshape(rows, layer.spec.num_kv_heads, -1, head_dim)
    return _attend_blocks(layer, grouped, blocks, kv_lens, grouped.shape[2]).reshape(rows, heads, head_dim)


def _attend_long_rows(layer: _Layer, q: jax.Array, rows: Rows) -> jax.Array:
    """Attend the rows of two or more tokens: q [T, N, D] -> [T, N, D]. Undefined for all others."""
    num_tokens, heads, head_dim = q.shape
    kv_heads = layer.spec.num_kv_heads
    group = heads // kv_heads
    block = max(1, layer.tuning.rows // group)
    cut = query_blocks(rows, num_tokens, block, min_tokens=2)
    position = rows.kv_len[cut.row] - rows.q_len[cut.row] + cut.first
    end = jnp.minimum(rows.kv_len[cut.row], position + block)
    blocks = _QueryBlocks(cut.row, position, jnp.where(cut.live, end, 0))
    token = (rows.start[cut.row] + cut.first)[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
    by_block = q.at[token].get(mode="clip").reshape(-1, block, kv_heads, group, head_dim)
    by_block = by_block.transpose(0, 2, 1, 3, 4).reshape(-1, kv_heads, block * group, head_dim)
    out = _attend_blocks(layer, by_block, blocks, rows.kv_len, group).reshape(-1, kv_heads, block, group, head_dim)
    out = out.transpose(0, 2, 1, 3, 4).reshape(-1, heads, head_dim)
    return out.at[_place_in_blocks(cut, rows, num_tokens, block)].get(mode="clip")


def _place_in_blocks(cut: QueryBlocks, rows: Rows, num_tokens: int, block: int) -> jax.Array:
    """Return int32 [T]: index of each token among the tokens of all blocks. Undefined for a token in no block."""
    start = jnp.where(cut.live, rows.start[cut.row] + cut.first, num_tokens)  # ascending over the live blocks
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    index = jnp.searchsorted(start, token, side="right", method="compare_all").astype(jnp.int32) - 1
    return index * block + token - start[index]


def _attend_blocks(layer: _Layer, q: jax.Array, blocks: _QueryBlocks, kv_lens: jax.Array, group: int) -> jax.Array:
    """Attend blocks q [B, KH, M, D] -> the same shape. Zeros for unused blocks.

    M = query tokens x heads of a group, tokens first.
    """
    num_blocks, kv_heads, rows, head_dim = q.shape
    pages = max(1, layer.tuning.tile // layer.cache.shape[3])
    width = layer.page_table.shape[1]
    queries = pl.BlockSpec((None, kv_heads, rows, head_dim), lambda b, *_: (b, 0, 0, 0))
    softmax = pltpu.VMEM((kv_heads, rows, LANES), jnp.float32)
    leaves = jax.tree.leaves(layer.cache)
    kernel = pl.pallas_call(
        functools.partial(_kernel, spec=layer.spec, group=group, has_sinks=layer.sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_blocks,),
            in_specs=[
                pl.BlockSpec((None, 1, width), lambda b, row, *_: (row[b], 0, 0), memory_space=pltpu.SMEM),
                queries,
                pl.BlockSpec((kv_heads, rows, LANES), lambda b, *_: (0, 0, 0)),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in leaves),
            ],
            out_specs=queries,
            scratch_shapes=[
                pltpu.VMEM((kv_heads, rows, head_dim), jnp.float32),
                softmax,
                softmax,
                pltpu.SemaphoreType.DMA((2,)),
                *(pltpu.VMEM((2, pages, *leaf.shape[1:]), leaf.dtype) for leaf in leaves),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=layer.interpret,
        name="paged_attention",
    )
    sinks = _sinks_by_row(layer.sinks, kv_heads, rows)
    return kernel(*blocks, kv_lens, layer.page_table[:, None], q, sinks, *leaves)


def _sinks_by_row(sinks: jax.Array | None, kv_heads: int, rows: int) -> jax.Array:
    """Return the sink of each row of a block's product, repeated in all lanes: float32 [KH, M, 128]."""
    if sinks is None:
        return jnp.full((kv_heads, rows, LANES), MASKED, jnp.float32)
    by_head = sinks.astype(jnp.float32).reshape(kv_heads, -1)
    by_row = jnp.tile(by_head, (1, rows // by_head.shape[1]))
    return jnp.broadcast_to(by_row[:, :, None], (kv_heads, rows, LANES))


def _kernel(  # noqa: C901  one kernel
    # prefetched scalars, int32
    row_ref,  # [B]
    position_ref,  # [B]
    end_ref,  # [B]
    kv_len_ref,  # [R]
    # inputs
    table_ref,  # int32 [1, max_pages]  of this row
    q_ref,  # [KH, M, D]
    sink_ref,  # float32 [KH, M, 128]
    # pages [P, 2, KH, page_size, D] in HBM, scales of 8-bit pages [P, 2, KH, 1, page_size]
    # output
    #   out [KH, M, D]
    # scratch
    #   values float32 [KH, M, D]; top and total float32 [KH, M, 128]; DMA semaphores [2]
    #   two tiles of pages [2, pages, 2, KH, page_size, D], and of their scales
    *refs,
    spec: AttentionSpec,
    group: int,
    has_sinks: bool,
) -> None:
    kinds = (len(refs) - 5) // 2  # 2 with scales
    cache_refs, buffers = refs[:kinds], refs[-kinds:]
    out_ref, values_ref, top_ref, total_ref, copied = refs[kinds:-kinds]
    block = pl.program_id(0)
    row, position, end = row_ref[block], position_ref[block], end_ref[block]
    kv_len = kv_len_ref[row]
    kv_buffer, *scale_buffers = buffers
    _, pages, kept, kv_heads, page_size, head_dim = kv_buffer.shape
    tile = pages * page_size
    oldest = 0 if spec.sees_all else spec.oldest(position)
    begin, stop = oldest // tile, (end + tile - 1) // tile

    def copies(index: jax.Array):
        """Yield the copies of tile `index`, an int32 [], to its buffer. After the context the last page is repeated."""
        slot = lax.rem(index, 2)
        for place in range(pages):
            column = jnp.minimum(index * pages + place, (kv_len - 1) // page_size)
            page = table_ref[0, column]
            for cache_ref, buffer in zip(cache_refs, buffers, strict=True):
                yield pltpu.make_async_copy(cache_ref.at[page], buffer.at[slot, place], copied.at[slot])

    def scales(slot: jax.Array, half: int, head: int) -> jax.Array | None:
        """Return the scales of a head's tile, of K (0) or V (1), float32 [1, tile]; None if the pages have none."""
        if not scale_buffers:
            return None
        half = min(half, scale_buffers[0].shape[2] - 1)
        return jnp.concatenate([scale_buffers[0][slot, place, half, head] for place in range(pages)], axis=1)

    def start(index: jax.Array) -> None:
        """Start the copies of tile `index`, an int32 []."""
        for copy in copies(index):
            copy.start()

    def add_tile(index: jax.Array, _: None) -> None:
        """Prefetch the next tile, then add tile `index`, an int32 [], to the softmax of every head."""

        @pl.when(index + 1 < stop)
        def _prefetch() -> None:
            start(index + 1)

        for copy in copies(index):
            copy.wait()
        slot = lax.rem(index, 2)
        shape = (q_ref.shape[1], tile)
        column = index * tile + lax.broadcasted_iota(jnp.int32, shape, 1)
        query = position + lax.broadcasted_iota(jnp.int32, shape, 0) // group
        seen = column <= query
        if not spec.sees_all:
            seen &= spec.reaches(column, query)
        place = index * tile + lax.broadcasted_iota(jnp.int32, (tile, head_dim), 0)
        live, scaled = place < kv_len, column[:1] < kv_len
        if not spec.sees_all:
            live &= place >= oldest
            scaled &= column[:1] >= oldest
        for head in range(kv_heads):
            k = kv_buffer[slot, :, 0, head].reshape(tile, head_dim)
            v = kv_buffer[slot, :, kept - 1, head].reshape(tile, head_dim)
            v = jnp.where(live, v, jnp.zeros_like(v))  # 0 * NaN is NaN: the page may hold another request's NaN
            k_scale, v_scale = scales(slot, 0, head), scales(slot, 1, head)
            v_scale = None if v_scale is None else jnp.where(scaled, v_scale, 0.0)
            tile_of_head = _HeadTile(k, v, k_scale, v_scale, seen)
            _add_head(head, q_ref[head], tile_of_head, spec, values_ref, top_ref, total_ref)

    @pl.when(begin < stop)
    def _first() -> None:
        start(begin)

    values_ref[...] = jnp.zeros_like(values_ref)
    top_ref[...] = sink_ref[...]
    total_ref[...] = jnp.full(total_ref.shape, 1.0 if has_sinks else 0.0, jnp.float32)
    lax.fori_loop(begin, stop, add_tile, None)
    for head in range(kv_heads):
        total = total_ref[head][:, :1]
        out_ref[head] = (values_ref[head] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)


class _HeadTile(NamedTuple):
    """A tile of one kv head: K and V [tile, D], their scales float32 [1, tile] or None, the mask bool [M, tile]."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    seen: jax.Array


def _add_head(head: int, q, tile: _HeadTile, spec: AttentionSpec, values_ref, top_ref, total_ref) -> None:
    """Add one tile of one kv head to its softmax: q [M, D]. Scales multiply scores and weights, not K and V."""
    k, v, seen = tile.k.astype(q.dtype), tile.v.astype(q.dtype), tile.seen
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    scores = dot(q, k, (((1,), (1,)), ((), ()))) * spec.scale
    if tile.k_scale is not None:
        scores *= tile.k_scale
    if spec.soft_cap is not None:
        scores = jnp.tanh(scores / spec.soft_cap) * spec.soft_cap
    scores = jnp.where(seen, scores, MASKED)
    old = top_ref[head][:, :1]
    top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    fade = jnp.exp(old - top)
    total = total_ref[head][:, :1] * fade + jnp.sum(weights, axis=1, keepdims=True)
    if tile.v_scale is not None:
        weights *= tile.v_scale
    values_ref[head] = values_ref[head] * fade + dot(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
    top_ref[head] = jnp.broadcast_to(top, top_ref.shape[1:])
    total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])
