"""Paged attention for NVIDIA GPUs in Pallas, lowered through Triton.

There are three kernels over the interleaved pages:
    decode   rows of one token. Grid (row, kv head, split), see `split_kv`.
    join     the splits of such rows. Grid (row, kv head).
    extend   rows of several tokens. Grid (query block, kv head). The blocks come from `ragged.query_blocks`. Tiles
             wholly below the diagonal need no mask (FlashAttention-2, arXiv 2307.08691).
The G query heads of a kv head are rows of one matrix product. The softmax is float32 in base 2. Sinks are added after
the kernel, through the log-sum-exp.

Triton takes only shapes that are powers of two; other head counts and sizes use masked loads and stores.
Its gathers use offsets of 32 bits if a layer's cache has up to 4 GiB; a larger cache works but is slower. The offsets
have a sign, so the memory plan makes no 8-bit pages of 2 to 4 GiB (`memory.addressable`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, InterleavedLayout, ProjectedHeads
from jaxserve.ops.paged_attention.ragged import Rows, attend_ragged, query_blocks
from jaxserve.ops.paged_attention.scaled_pages import Pages
from jaxserve.ops.paged_attention.split_kv import PROGRAMS, LayerPages, join_splits, num_splits
from jaxserve.ops.paged_attention.triton import heads as heads_kernel
from jaxserve.ops.paged_attention.triton import latent as latent_kernels
from jaxserve.ops.paged_attention.triton.latent import LatentTuning
from jaxserve.ops.paged_attention.triton.parts import Base2Softmax, Scales, add_tile, empty, finish, join, places
from jaxserve.ops.triton_arrays import TENSOR_CORE_ROWS, dot, index_grid, load, mask_of, padded


@dataclass(frozen=True)
class TritonTuning:
    """Sizes of the kernels. A tile is in tokens of context.

    From 5 stages on Triton loads a tile while it computes on another, because it spends two stages on the page table.
    """

    decode_tile: int = 32
    decode_warps: int = 4
    decode_stages: int = 5
    programs: int = PROGRAMS
    # Rows of the extend kernel's products: query tokens x heads of a group. Of heads of up to 256 half as many, because
    # more do not fit into registers (ptxas for sm_90 reports 1.2 KB of spills); of larger ones, up to 512, a quarter,
    # with half of the tile, because more do not fit into the 227 KiB of shared memory.
    extend_rows: int = 128
    extend_tile: int = 64
    extend_warps: int = 8
    extend_stages: int = 5

    def splits(self, num_rows: int, num_kv_heads: int, max_context: int) -> int:
        """Return the number of splits of a decode step, with at least two tiles per split, see `num_splits`."""
        return num_splits(self.programs, num_rows * num_kv_heads, max_context, 2 * self.decode_tile)

    def extend_sizes(self, head_dim: int) -> tuple[int, int]:
        """Return the rows and the tile of the extend kernel."""
        if head_dim <= 128:
            return self.extend_rows, self.extend_tile
        if head_dim <= 256:
            return self.extend_rows // 2, self.extend_tile
        return self.extend_rows // 4, self.extend_tile // 2


@dataclass(frozen=True)
class TritonBackend(InterleavedLayout):
    """See the module docstring. interpret: run the kernels in Pallas' interpreter, slowly, on any device."""

    name: str = "triton"
    tuning: TritonTuning = TritonTuning()
    latent: LatentTuning = field(default_factory=LatentTuning)
    interpret: bool = False

    def attend(
        self,
        q: jax.Array,
        cache: Pages,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attend q [T, N, D] -> [T, N, D], see `Backend.attend`."""
        layer = LayerPages(cache, metadata.page_table, spec, sinks)
        if cache.shape[2] == spec.num_kv_heads == 1:
            return self._attend_latent(q, layer, metadata)
        decode = functools.partial(_attend_last_tokens, layer, tuning=self.tuning, interpret=self.interpret)
        extend = functools.partial(_attend_long_rows, layer, tuning=self.tuning, interpret=self.interpret)
        return attend_ragged(q, metadata, decode, extend)

    def write_heads(
        self, heads: ProjectedHeads, cache: jax.Array, slot_mapping: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Norm, rotate and write at slot_mapping int32 [T] -> q [T, N, D], cache [P, page_size, 2 * KH, D]."""
        return heads_kernel.write_heads(heads, cache, slot_mapping, interpret=self.interpret)

    def _attend_latent(self, q: jax.Array, layer: LayerPages, metadata: AttentionMetadata) -> jax.Array:
        """Attend q [T, N, D] to latent pages -> [T, N, columns]."""
        options = {"tuning": self.latent, "interpret": self.interpret}
        decode = functools.partial(latent_kernels.attend_last_tokens, layer, **options)
        return attend_ragged(q, metadata, decode, functools.partial(latent_kernels.attend_long_rows, layer, **options))


def _attend_last_tokens(
    layer: LayerPages, q: jax.Array, kv_lens: jax.Array, *, tuning: TritonTuning, interpret: bool
) -> jax.Array:
    """Attend q [R, N, D], the token at kv_len - 1 of each row -> [R, N, D]. Zeros if kv_len is 0."""
    rows, heads, head_dim = q.shape
    kv_heads, pages = layer.spec.num_kv_heads, jax.tree.leaves(layer.tokens)
    group = heads // kv_heads
    page_size = layer.cache.shape[1]
    splits = tuning.splits(rows, kv_heads, layer.page_table.shape[1] * page_size)
    kernel = functools.partial(
        _decode_kernel, spec=layer.spec, page_size=page_size, tile=tuning.decode_tile, splits=splits
    )
    out, lse = pl.pallas_call(
        kernel,
        grid=(rows, kv_heads, splits),
        in_specs=[
            pl.BlockSpec((None, None, group, head_dim), lambda r, h, s: (r, h, 0, 0)),
            *_of_head(pages),
            pl.BlockSpec((None, layer.page_table.shape[1]), lambda r, h, s: (r, 0)),
            pl.BlockSpec((None,), lambda r, h, s: (r,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, group, head_dim), lambda r, h, s: (r, s, h, 0, 0)),
            pl.BlockSpec((None, None, None, group), lambda r, h, s: (r, s, h, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, splits, kv_heads, group, head_dim), jnp.float32 if splits > 1 else q.dtype),
            jax.ShapeDtypeStruct((rows, splits, kv_heads, group), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tuning.decode_warps, num_stages=tuning.decode_stages),
        interpret=interpret,
        name="paged_decode",
    )(q.reshape(rows, kv_heads, group, head_dim), *pages, layer.page_table, kv_lens)
    if splits > 1:
        return join(out, lse, layer.sinks, q.dtype, interpret=interpret).reshape(q.shape)
    return join_splits(out.reshape(rows, 1, heads, -1), lse.reshape(rows, 1, heads), layer.sinks).astype(q.dtype)


def _attend_long_rows(
    layer: LayerPages, q: jax.Array, rows: Rows, *, tuning: TritonTuning, interpret: bool
) -> jax.Array:
    """Attend the rows of two or more tokens: q [T, N, D] -> [T, N, D]. Undefined for all others."""
    num_tokens, heads, head_dim = q.shape
    kv_heads, pages = layer.spec.num_kv_heads, jax.tree.leaves(layer.tokens)
    group = heads // kv_heads
    block_rows, tile = tuning.extend_sizes(head_dim)
    block = max(1, block_rows // pl.next_power_of_2(group))
    blocks = query_blocks(rows, num_tokens, block, min_tokens=2)
    kernel = functools.partial(_extend_kernel, spec=layer.spec, page_size=layer.cache.shape[1], block=block, tile=tile)
    first = jnp.where(blocks.live, blocks.first, -1)
    scalars = [blocks.row, first, rows.start, rows.q_len, rows.kv_len, layer.page_table]
    by_head = pl.BlockSpec((num_tokens, None, group, head_dim), lambda b, h: (0, h, 0, 0))
    out, lse = pl.pallas_call(
        kernel,
        grid=(first.shape[0], kv_heads),
        in_specs=[
            by_head,
            *_of_head(pages),
            *(pl.BlockSpec(x.shape, lambda b, h, ndim=x.ndim: (0,) * ndim) for x in scalars),
        ],
        out_specs=[by_head, pl.BlockSpec((num_tokens, None, group), lambda b, h: (0, h, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, kv_heads, group, head_dim), q.dtype),
            jax.ShapeDtypeStruct((num_tokens, kv_heads, group), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tuning.extend_warps, num_stages=tuning.extend_stages),
        interpret=interpret,
        name="paged_extend",
    )(q.reshape(num_tokens, kv_heads, group, head_dim), *pages, *scalars)
    out, lse = out.reshape(q.shape), lse.reshape(num_tokens, heads)
    if layer.sinks is not None:
        out = join_splits(out[:, None], lse[:, None], layer.sinks).astype(q.dtype)
    return out


def _of_head(pages: list[jax.Array]) -> list[pl.BlockSpec]:
    """Return the blocks of a program's kv head, axis 1 of the grid: all tokens of each array [tokens, KH, 2, D]."""
    return [pl.BlockSpec((x.shape[0], None, *x.shape[2:]), lambda _, h, *__: (0, h, 0, 0)) for x in pages]


class _Tile(NamedTuple):
    """A tile of context: K and V [tile, D], and the scales of 8-bit pages."""

    k: jax.Array
    v: jax.Array
    scales: Scales


def _add(state: Base2Softmax, q: jax.Array, tile: _Tile, spec: AttentionSpec, seen) -> Base2Softmax:
    """Add one tile of context: q [M, D]; `seen` bool [M or 1, tile], None if all is seen."""
    k, v = tile.k.astype(q.dtype), tile.v.astype(q.dtype)
    return add_tile(state, dot(q, k, (1, 1)), (v,), tile.scales, spec, seen)


def _load_tile(pages, table, token: jax.Array, page_size: int, ends: tuple[jax.Array | int, jax.Array]) -> _Tile:
    """Load the positions `token` of a row, see `places`.

    pages: refs of this head's pages [tokens, 2, D] and, if they have 8 bits, of their scales [tokens, 2, 1].
    """
    place = places(table, token, page_size, ends)
    kv_ref, *scales = pages
    columns, limit = padded(kv_ref.shape[2])
    rows, columns = index_grid(place, columns)
    halves = [load(kv_ref, (rows, half, columns), (None, None, limit)) for half in range(kv_ref.shape[1])]
    factors = [plt.load(ref.at[place, half, 0]) for ref in scales for half in range(kv_ref.shape[1])]
    return _Tile(halves[0], halves[-1], Scales(*(factors[:1] + factors[-1:])))


def _decode_kernel(
    q_ref,  # [G, D]
    # pages [P * page_size, 2, D] of this kv head, and scales [P * page_size, 2, 1] of 8-bit ones
    # page table int32 [max_pages], context length int32 []
    # out [G, D], lse float32 [G]
    *refs,
    spec: AttentionSpec,
    page_size: int,
    tile: int,
    splits: int,
) -> None:
    *pages, table_ref, len_ref, out_ref, lse_ref = refs
    kv_len = len_ref[()]
    (heads, head_limit), (columns, column_limit) = padded(q_ref.shape[0], TENSOR_CORE_ROWS), padded(q_ref.shape[1])
    own, limits = index_grid(heads, columns), (head_limit, column_limit)
    q = load(q_ref, own, limits)
    oldest = 0 if spec.sees_all else spec.oldest_before(kv_len)
    first, last = oldest // tile, pl.cdiv(kv_len, tile)
    share = pl.cdiv(last - first, splits)  # tiles per split
    begin = first + pl.program_id(2) * share

    def step(index: jax.Array, state: Base2Softmax) -> Base2Softmax:
        """Add tile `index`, an int32 [], to the softmax."""
        token = index * tile + jnp.arange(tile, dtype=jnp.int32)
        seen = (token < kv_len) & (token >= oldest)
        kv = _load_tile(pages, lambda page: table_ref[page], token, page_size, (oldest, kv_len - 1))
        return _add(state, q, kv, spec, seen[None, :])

    state = lax.fori_loop(begin, jnp.minimum(begin + share, last), step, empty(*q.shape))
    (out,), lse = finish(state)
    plt.store(out_ref.at[own], out.astype(out_ref.dtype), mask=mask_of(own, limits))
    plt.store(lse_ref.at[heads], lse, mask=mask_of((heads,), (head_limit,)))


def _extend_kernel(
    q_ref,  # [T, G, D]  of this kv head
    # pages and scales as in `_decode_kernel`
    # row of each block int32 [B], its first token in the row int32 [B], -1 for an unused block
    # a row's first token in q, its tokens, its context length: int32 [R] each; page tables int32 [R, max_pages]
    # out [T, G, D], lse float32 [T, G]
    *refs,
    spec: AttentionSpec,
    page_size: int,
    block: int,
    tile: int,
) -> None:
    *pages, row_ref, first_ref, start_ref, q_len_ref, kv_len_ref, table_ref, out_ref, lse_ref = refs
    index = pl.program_id(0)

    @pl.when(first_ref[index] >= 0)
    def _live() -> None:
        row, first = row_ref[index], first_ref[index]
        q_len, kv_len = q_len_ref[row], kv_len_ref[row]
        (heads, head_limit), (columns, column_limit) = padded(q_ref.shape[1]), padded(q_ref.shape[2])
        token = first + jnp.arange(block, dtype=jnp.int32)  # in the row
        place = jnp.where(token < q_len, start_ref[row] + token, q_ref.shape[0])
        own = index_grid(place, heads, columns)
        limits = (q_ref.shape[0], head_limit, column_limit)
        q = load(q_ref, own, limits).reshape(block * heads.shape[0], columns.shape[0])
        position = kv_len - q_len + first  # of the block's first token
        query = position + jnp.arange(q.shape[0], dtype=jnp.int32) // heads.shape[0]
        oldest = 0 if spec.sees_all else spec.oldest(position)

        def step(index: jax.Array, state: Base2Softmax, masked: bool) -> Base2Softmax:
            """Add tile `index`, an int32 [], to the softmax; masked: some queries do not see all of it."""
            context = index * tile + jnp.arange(tile, dtype=jnp.int32)
            ends = (oldest, kv_len - 1)
            kv = _load_tile(pages, lambda page: table_ref[row, page], context, page_size, ends)
            if not masked:
                return _add(state, q, kv, spec, None)
            live = (context < kv_len) & (context >= oldest)
            seen = (context[None, :] <= query[:, None]) & live[None, :]
            if not spec.sees_all:
                seen &= spec.reaches(context[None, :], query[:, None])
            return _add(state, q, kv, spec, seen)

        begin, end = oldest // tile, pl.cdiv(jnp.minimum(kv_len, position + block), tile)
        # Tiles that every query of the block sees entirely: the tiles before the diagonal, if a token sees all.
        whole = jnp.minimum((position + 1) // tile, end) if spec.sees_all else begin
        state = lax.fori_loop(begin, whole, functools.partial(step, masked=False), empty(*q.shape))
        state = lax.fori_loop(whole, end, functools.partial(step, masked=True), state)
        (out,), lse = finish(state)
        shape = own[0].shape
        plt.store(out_ref.at[own], out.reshape(shape).astype(out_ref.dtype), mask=mask_of(own, limits))
        own = index_grid(place, heads)
        plt.store(lse_ref.at[own], lse.reshape(shape[:2]), mask=mask_of(own, limits[:2]))
