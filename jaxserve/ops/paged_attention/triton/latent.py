"""Latent attention (MLA) for NVIDIA GPUs in Pallas, lowered through Triton: one row of a token serves all heads.

There are two kernels over latent pages, in which V is the first columns of K (https://arxiv.org/abs/2412.19437):
    decode   rows of one token. Grid (block of heads, row, split), see `split_kv`.
    extend   rows of several tokens. Grid (block of heads, block of tokens), see `ragged.query_blocks`.

A block of heads is the rows of one matrix product, and reads every row of the context once. Blocks of one token run
side by side, so all except the first read it from the second-level cache. The columns are split into two parts that are
powers of two, because Triton accepts no others: 576 columns are 512 + 64, where one part would be 1,024.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.ops.paged_attention.base import AttentionSpec
from jaxserve.ops.paged_attention.ragged import Rows, query_blocks
from jaxserve.ops.paged_attention.scaled_pages import is_scaled
from jaxserve.ops.paged_attention.split_kv import LayerPages, join_splits, num_splits
from jaxserve.ops.paged_attention.triton.parts import Base2Softmax, Scales, add_tile, empty, finish, join, places
from jaxserve.ops.triton_arrays import TENSOR_CORE_ROWS, dot, index_grid, load, mask_of, padded


@dataclass(frozen=True)
class LatentTuning:
    """Sizes of the kernels. A tile is in tokens of context."""

    rows: int = 64  # of a product: heads, or tokens x heads. 128 would need more registers than a thread has.
    scaled_rows: int = 32  # of 8-bit pages, whose conversion takes registers too: 64 rows spill 0.3 to 0.7 KB
    tile: int = 32
    warps: int = 8
    stages: int = 5
    programs: int = 132  # programs that fill an H200: one for each multiprocessor, whose shared memory holds one


class _Part(NamedTuple):
    """A power of two of consecutive columns: their indices int32, and the limit for masks, None if all exist."""

    columns: jax.Array
    limit: int | None


class _Sizes(NamedTuple):
    """The static sizes that both kernels need."""

    spec: AttentionSpec
    page_size: int
    head_dim: int
    tile: int
    block: int  # heads of a program
    tokens: int  # of an extend program

    @property
    def parts(self) -> tuple[_Part, ...]:
        """Return the columns of K: the largest power of two, and the others."""
        first = 1 << (self.head_dim.bit_length() - 1)
        whole = (_Part(jnp.arange(first, dtype=jnp.int32), None),)
        if first == self.head_dim:
            return whole
        columns, limit = padded(self.head_dim - first, TENSOR_CORE_ROWS)
        return *whole, _Part(first + columns, None if limit is None else self.head_dim)

    @property
    def value_parts(self) -> tuple[_Part, ...]:
        """Return the parts in which V has columns."""
        first, *others = self.parts
        wanted = self.spec.value_columns
        return (first,) if wanted is not None and wanted <= first.columns.shape[0] else (first, *others)

    @property
    def out_columns(self) -> int:
        """Return the number of columns of the result."""
        return self.head_dim if len(self.value_parts) == len(self.parts) else 1 << (self.head_dim.bit_length() - 1)


def _sizes(layer: LayerPages, heads: int, tuning: LatentTuning) -> _Sizes:
    _, page_size, _, head_dim = layer.cache.shape
    rows = tuning.scaled_rows if is_scaled(layer.cache.dtype) else tuning.rows
    block = max(TENSOR_CORE_ROWS, min(rows, pl.next_power_of_2(heads)))
    return _Sizes(layer.spec, page_size, head_dim, tuning.tile, block, max(1, rows // block))


def _flat(layer: LayerPages) -> list[jax.Array]:
    """Return the rows of all pages [tokens, D], and of 8-bit ones their scales [tokens]."""
    values, *scales = jax.tree.leaves(layer.tokens)
    return [values.reshape(values.shape[0], -1), *(x.reshape(-1) for x in scales)]


def _whole(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[pl.BlockSpec]:
    """Return the specs of arrays that every program sees whole."""
    return [pl.BlockSpec(x.shape, lambda *_, ndim=x.ndim: (0,) * ndim) for x in arrays]


def attend_last_tokens(
    layer: LayerPages, q: jax.Array, kv_lens: jax.Array, *, tuning: LatentTuning, interpret: bool
) -> jax.Array:
    """Attend q [R, N, D], the token at kv_len - 1 of each row -> [R, N, columns]. Zeros if kv_len is 0."""
    rows, heads, head_dim = q.shape
    width = layer.page_table.shape[1]
    sizes = _sizes(layer, heads, tuning)
    blocks = pl.cdiv(heads, sizes.block)
    splits = num_splits(tuning.programs, rows * blocks, width * sizes.page_size, 4 * tuning.tile)
    pages, columns = _flat(layer), sizes.out_columns
    out, lse = pl.pallas_call(
        functools.partial(_decode_kernel, sizes=sizes, splits=splits),
        grid=(blocks, rows, splits),
        in_specs=[
            pl.BlockSpec((None, heads, head_dim), lambda h, r, s: (r, 0, 0)),
            *_whole(pages),
            pl.BlockSpec((None, width), lambda h, r, s: (r, 0)),
            pl.BlockSpec((None,), lambda h, r, s: (r,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, heads, columns), lambda h, r, s: (r, s, 0, 0)),
            pl.BlockSpec((None, None, heads), lambda h, r, s: (r, s, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, splits, heads, columns), jnp.float32 if splits > 1 else q.dtype),
            jax.ShapeDtypeStruct((rows, splits, heads), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name="paged_decode_latent",
    )(q, *pages, layer.page_table, kv_lens)
    if splits == 1:
        return join_splits(out, lse, layer.sinks).astype(q.dtype)
    by_head = out.reshape(rows, splits, heads, 1, columns), lse.reshape(rows, splits, heads, 1)
    return join(*by_head, layer.sinks, q.dtype, interpret=interpret).reshape(rows, heads, columns)


def attend_long_rows(
    layer: LayerPages, q: jax.Array, rows: Rows, *, tuning: LatentTuning, interpret: bool
) -> jax.Array:
    """Attend the rows of two or more tokens: q [T, N, D] -> [T, N, columns]. Undefined for all others."""
    num_tokens, heads, _ = q.shape
    sizes = _sizes(layer, heads, tuning)
    blocks = query_blocks(rows, num_tokens, sizes.tokens, min_tokens=2)
    first = jnp.where(blocks.live, blocks.first, -1)
    inputs = [q, *_flat(layer), blocks.row, first, rows.start, rows.q_len, rows.kv_len, layer.page_table]
    shape = num_tokens, heads, sizes.out_columns
    out, lse = pl.pallas_call(
        functools.partial(_extend_kernel, sizes=sizes),
        grid=(pl.cdiv(heads, sizes.block), first.shape[0]),
        in_specs=_whole(inputs),
        out_specs=_whole([jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct(shape[:2], jnp.float32)]),
        out_shape=[jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct(shape[:2], jnp.float32)],
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name="paged_extend_latent",
    )(*inputs)
    if layer.sinks is not None:
        out = join_splits(out[:, None], lse[:, None], layer.sinks).astype(q.dtype)
    return out


def _add(state: Base2Softmax, q: list[jax.Array], pages, place: jax.Array, sizes: _Sizes, seen) -> Base2Softmax:
    """Add one tile of context: q in parts [M, columns], place int32 [tile], see `places`; seen: see `add_tile`."""
    values, *scales = pages
    rows = [
        load(values, index_grid(place, part.columns), (None, part.limit)).astype(q[0].dtype) for part in sizes.parts
    ]
    scores = sum(dot(mine, row, (1, 1)) for mine, row in zip(q[1:], rows[1:], strict=True)) + dot(q[0], rows[0], (1, 1))
    scale = plt.load(scales[0].at[place]) if scales else None
    return add_tile(state, scores, tuple(rows[: len(sizes.value_parts)]), Scales(scale, scale), sizes.spec, seen)


def _start(rows: int, sizes: _Sizes) -> Base2Softmax:
    return empty(rows, *(part.columns.shape[0] for part in sizes.value_parts))


def _decode_kernel(
    q_ref,  # [N, D]
    # pages [P * page_size, D], scales [P * page_size] of 8-bit ones
    # page table int32 [max_pages], context length int32 []
    # out [N, columns], lse float32 [N]
    *refs,
    sizes: _Sizes,
    splits: int,
) -> None:
    *pages, table_ref, len_ref, out_ref, lse_ref = refs
    kv_len, spec = len_ref[()], sizes.spec
    head = pl.program_id(0) * sizes.block + jnp.arange(sizes.block, dtype=jnp.int32)
    limit = q_ref.shape[0] if q_ref.shape[0] % sizes.block else None
    q = [load(q_ref, index_grid(head, part.columns), (limit, part.limit)) for part in sizes.parts]
    oldest = 0 if spec.sees_all else spec.oldest_before(kv_len)
    first, last = oldest // sizes.tile, pl.cdiv(kv_len, sizes.tile)
    share = pl.cdiv(last - first, splits)  # tiles per split
    begin = first + pl.program_id(2) * share

    def step(index: jax.Array, state: Base2Softmax) -> Base2Softmax:
        """Add tile `index`, an int32 [], to the softmax."""
        token = index * sizes.tile + jnp.arange(sizes.tile, dtype=jnp.int32)
        seen = (token < kv_len) & (token >= oldest)
        place = places(lambda page: table_ref[page], token, sizes.page_size, (oldest, kv_len - 1))
        return _add(state, q, pages, place, sizes, seen[None, :])

    state = lax.fori_loop(begin, jnp.minimum(begin + share, last), step, _start(sizes.block, sizes))
    values, lse = finish(state)
    for part, out in zip(sizes.value_parts, values, strict=True):
        own = index_grid(head, part.columns)
        plt.store(out_ref.at[own], out.astype(out_ref.dtype), mask=mask_of(own, (limit, part.limit)))
    plt.store(lse_ref.at[head], lse, mask=mask_of((head,), (limit,)))


def _extend_kernel(
    q_ref,  # [T, N, D]
    # pages and scales as in `_decode_kernel`
    # row of each block int32 [B], its first token in the row int32 [B], -1 for an unused block
    # a row's first token in q, its tokens, its context length: int32 [R] each; page tables int32 [R, max_pages]
    # out [T, N, columns], lse float32 [T, N]
    *refs,
    sizes: _Sizes,
) -> None:
    *pages, row_ref, first_ref, start_ref, q_len_ref, kv_len_ref, table_ref, out_ref, lse_ref = refs
    first_head, index, spec = pl.program_id(0) * sizes.block, pl.program_id(1), sizes.spec

    @pl.when(first_ref[index] >= 0)
    def _live() -> None:
        row, first = row_ref[index], first_ref[index]
        q_len, kv_len = q_len_ref[row], kv_len_ref[row]
        # The rows of the products: heads of the first token, then of the next.
        each = jnp.arange(sizes.tokens * sizes.block, dtype=jnp.int32)
        token, head = first + each // sizes.block, first_head + each % sizes.block
        live = (token < q_len) & (head < q_ref.shape[1])
        place = jnp.where(live, start_ref[row] + token, q_ref.shape[0])
        q = [_load_rows(q_ref, place, head, part) for part in sizes.parts]
        position = kv_len - q_len + first  # of the block's first token
        query = kv_len - q_len + token
        oldest = 0 if spec.sees_all else spec.oldest(position)

        def step(index: jax.Array, state: Base2Softmax) -> Base2Softmax:
            """Add tile `index`, an int32 [], to the softmax."""
            context = index * sizes.tile + jnp.arange(sizes.tile, dtype=jnp.int32)
            where = places(lambda page: table_ref[row, page], context, sizes.page_size, (oldest, kv_len - 1))
            seen = (context[None, :] <= query[:, None]) & ((context < kv_len) & (context >= oldest))[None, :]
            if not spec.sees_all:
                seen &= spec.reaches(context[None, :], query[:, None])
            return _add(state, q, pages, where, sizes, seen)

        end = pl.cdiv(jnp.minimum(kv_len, position + sizes.tokens), sizes.tile)
        state = lax.fori_loop(oldest // sizes.tile, end, step, _start(each.shape[0], sizes))
        values, lse = finish(state)
        for part, out in zip(sizes.value_parts, values, strict=True):
            own, mask = _rows_at(place, head, part, q_ref.shape[0])
            plt.store(out_ref.at[own], out.astype(out_ref.dtype), mask=mask)
        plt.store(lse_ref.at[place, head], lse, mask=place < q_ref.shape[0])


def _rows_at(
    place: jax.Array, head: jax.Array, part: _Part, num_tokens: int
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return the indices [M, columns] of rows (place, head) int32 [M], and whether each exists."""
    token, columns = index_grid(place, part.columns)
    own = token, index_grid(head, part.columns)[0], columns
    mask = mask_of(own, (num_tokens, None, part.limit))
    assert mask is not None
    return own, mask


def _load_rows(ref, place: jax.Array, head: jax.Array, part: _Part) -> jax.Array:
    """Load the rows (place, head) int32 [M] of ref [T, N, D] -> [M, columns], zeros for rows that do not exist."""
    own, mask = _rows_at(place, head, part, ref.shape[0])
    return plt.load(ref.at[own], mask=mask, other=0)
