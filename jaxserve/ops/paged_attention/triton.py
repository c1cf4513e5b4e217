"""Paged attention for NVIDIA GPUs in Pallas, lowered through Triton.

Owns two kernels over the interleaved pages, and the XLA code around them:
    decode   rows of one token. Grid (row, kv head, split). The context of a row is cut into splits so that few rows
             fill the GPU too. Each split writes its normalised output and the log-sum-exp of its scores; XLA joins
             the splits (flash decoding, https://pytorch.org/blog/flash-decoding/).
    extend   rows of several tokens. Grid (query block, kv head). The blocks come from `ragged.query_blocks`. Tiles
             wholly below the diagonal need no mask (FlashAttention-2, arXiv 2307.08691).
The G query heads of a kv head are rows of one matrix product. The softmax is float32 in base 2. Sinks are added after
the kernel, through the log-sum-exp.

Triton takes only shapes that are powers of two; other head counts and sizes use masked loads and stores.
Its gathers use 32-bit indices if a layer's cache is below 4 GiB; a larger cache works but is slower.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.ops.paged_attention.base import MASKED, AttentionMetadata, AttentionSpec, InterleavedLayout
from jaxserve.ops.paged_attention.ragged import Rows, attend_ragged, query_blocks, tokens_of_long_rows

LOG2E = math.log2(math.e)
TENSOR_CORE_ROWS = 16  # fewest rows of a Triton dot


@dataclass(frozen=True)
class TritonTuning:
    """Sizes of the kernels. A tile is in tokens of context; `programs` is how many should fill the GPU."""

    decode_tile: int = 64
    decode_warps: int = 4
    decode_stages: int = 3
    programs: int = 528  # four for each of an H200's 132 multiprocessors
    max_splits: int = 16
    # Rows of the extend kernel's products: query tokens x heads of a group. Halved if head_dim is above 128, where
    # they do not fit into registers (ptxas for sm_90 reports 1.2 KB of spills).
    extend_rows: int = 128
    extend_tile: int = 64
    extend_warps: int = 8
    extend_stages: int = 3

    def splits(self, num_rows: int, num_kv_heads: int, max_context: int) -> int:
        """Return the number of splits: a power of two that fills the GPU, with at least two tiles per split.

        It depends on shapes only and never on the rows of the step, so a row is always summed in the same order.
        """
        wanted = pl.cdiv(self.programs, num_rows * num_kv_heads)
        longest = max(1, max_context // (2 * self.decode_tile))
        return 1 << (min(wanted, longest, self.max_splits).bit_length() - 1)


@dataclass(frozen=True)
class TritonBackend(InterleavedLayout):
    """See the module docstring. interpret: run the kernels in Pallas' interpreter, slowly, on any device."""

    name: str = "triton"
    tuning: TritonTuning = TritonTuning()
    interpret: bool = False

    def attend(
        self,
        q: jax.Array,
        cache: jax.Array,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """See `Backend.attend`: q [T, N, D] -> [T, N, D]."""
        layer = Layer(cache, metadata.page_table, spec, sinks)
        decode = functools.partial(_attend_last_tokens, layer, tuning=self.tuning, interpret=self.interpret)
        extend = functools.partial(_attend_long_rows, layer, tuning=self.tuning, interpret=self.interpret)
        return attend_ragged(q, metadata, decode, extend)


class Layer(NamedTuple):
    """The inputs of both kernels."""

    cache: jax.Array  # [P, page_size, 2 * KH, D]
    page_table: jax.Array  # int32 [R, max_pages]
    spec: AttentionSpec
    sinks: jax.Array | None  # [N]

    @property
    def tokens(self) -> jax.Array:
        """The pages as [P * page_size, KH, 2, D], or [..., 1, D] if V is K. A reshape without a copy."""
        pages, page_size, _, head_dim = self.cache.shape
        return self.cache.reshape(pages * page_size, self.spec.num_kv_heads, -1, head_dim)


def _attend_last_tokens(
    layer: Layer, q: jax.Array, kv_lens: jax.Array, *, tuning: TritonTuning, interpret: bool
) -> jax.Array:
    """Attend q [R, N, D], the token at kv_len - 1 of each row -> [R, N, D]. Zeros if kv_len is 0."""
    rows, heads, head_dim = q.shape
    kv_heads, tokens = layer.spec.num_kv_heads, layer.tokens
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
            pl.BlockSpec((tokens.shape[0], None, tokens.shape[2], head_dim), lambda r, h, s: (0, h, 0, 0)),
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
    )(q.reshape(rows, kv_heads, group, head_dim), tokens, layer.page_table, kv_lens)
    out, lse = out.reshape(rows, splits, heads, head_dim), lse.reshape(rows, splits, heads)
    return join_splits(out, lse, layer.sinks).astype(q.dtype)


def join_splits(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Join the splits: out [R, S, N, D] weighted by lse, their base-2 log-sum-exp float32 [R, S, N] -> [R, N, D]."""
    if out.shape[1] == 1 and sinks is None:
        return out[:, 0]
    if sinks is not None:  # sinks are one more split, whose output is zero
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, None] * LOG2E, (lse.shape[0], 1, lse.shape[2]))
        lse = jnp.concatenate([lse, sink], axis=1)
    weights = jnp.exp2(lse - jnp.max(lse, axis=1, keepdims=True))
    joined = jnp.sum(out.astype(jnp.float32) * weights[:, : out.shape[1], :, None], axis=1)
    return joined / jnp.sum(weights, axis=1)[..., None]


def _attend_long_rows(layer: Layer, q: jax.Array, rows: Rows, *, tuning: TritonTuning, interpret: bool) -> jax.Array:
    """Attend the rows of two or more tokens: q [T, N, D] -> [T, N, D]. Zeros for all other rows."""
    num_tokens, heads, head_dim = q.shape
    kv_heads, tokens = layer.spec.num_kv_heads, layer.tokens
    group = heads // kv_heads
    block_rows = tuning.extend_rows if head_dim <= 128 else tuning.extend_rows // 2
    block = max(1, block_rows // pl.next_power_of_2(group))
    blocks = query_blocks(rows, num_tokens, block, min_tokens=2)
    kernel = functools.partial(
        _extend_kernel, spec=layer.spec, page_size=layer.cache.shape[1], block=block, tile=tuning.extend_tile
    )
    first = jnp.where(blocks.live, blocks.first, -1)
    scalars = [blocks.row, first, rows.start, rows.q_len, rows.kv_len, layer.page_table]
    by_head = pl.BlockSpec((num_tokens, None, group, head_dim), lambda b, h: (0, h, 0, 0))
    out, lse = pl.pallas_call(
        kernel,
        grid=(first.shape[0], kv_heads),
        in_specs=[
            by_head,
            pl.BlockSpec((tokens.shape[0], None, tokens.shape[2], head_dim), lambda b, h: (0, h, 0, 0)),
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
    )(q.reshape(num_tokens, kv_heads, group, head_dim), tokens, *scalars)
    out, lse = out.reshape(q.shape), lse.reshape(num_tokens, heads)
    if layer.sinks is not None:
        out = join_splits(out[:, None], lse[:, None], layer.sinks).astype(q.dtype)
    # Memory that no block wrote is uninitialised.
    return jnp.where(tokens_of_long_rows(rows, num_tokens, 2)[:, None, None], out, jnp.zeros_like(out))


class _Softmax(NamedTuple):
    """An online softmax over M rows in base 2: weighted sum of values [M, D], maximum [M], denominator [M]."""

    values: jax.Array
    top: jax.Array
    total: jax.Array


def _empty(rows: int, columns: int) -> _Softmax:
    return _Softmax(
        jnp.zeros((rows, columns), jnp.float32), jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32)
    )


def _finish(state: _Softmax) -> tuple[jax.Array, jax.Array]:
    """Return the output [M, D], zeros for a row that saw nothing, and the base-2 log-sum-exp [M]."""
    total = jnp.maximum(state.total, 1e-30)
    return state.values / total[:, None], state.top + jnp.log2(total)


def _add_tile(state: _Softmax, q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, seen) -> _Softmax:
    """Add one tile of context: q [M, D], k and v [tile, D]; `seen` bool [M or 1, tile], None if all is seen."""
    scores = _dot(q, k, (1, 1)) * spec.scale
    if spec.soft_cap is not None:
        scores = jnp.tanh(scores / spec.soft_cap) * spec.soft_cap
    scores *= LOG2E
    if seen is not None:
        scores = jnp.where(seen, scores, MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - top[:, None])
    if seen is not None:
        weights = jnp.where(seen, weights, 0.0)
    fade = jnp.exp2(state.top - top)
    values = state.values * fade[:, None] + _dot(weights.astype(v.dtype), v, (1, 0))
    return _Softmax(values, top, state.total * fade + jnp.sum(weights, axis=1))


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Multiply with float32 accumulation. float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _grid(*sizes: jax.Array) -> tuple[jax.Array, ...]:
    """Return the index arrays of a gather: argument i varies along axis i and is broadcast over the others."""
    shape = tuple(size.shape[0] for size in sizes)
    return tuple(lax.broadcast_in_dim(size, shape, (axis,)) for axis, size in enumerate(sizes))


def _load(ref, indices: tuple[jax.Array | int, ...], limits: tuple[int | None, ...]) -> jax.Array:
    """Load ref[indices], with zero for an index at or above its axis's limit. Limit None: no index reaches it."""
    mask = _mask(indices, limits)
    return plt.load(ref.at[indices]) if mask is None else plt.load(ref.at[indices], mask=mask, other=0)


def _mask(indices: tuple[jax.Array | int, ...], limits: tuple[int | None, ...]) -> jax.Array | None:
    inside = [jnp.less(index, limit) for index, limit in zip(indices, limits, strict=True) if limit is not None]
    return functools.reduce(jnp.logical_and, inside) if inside else None


def _padded(size: int, least: int = 1) -> tuple[jax.Array, int | None]:
    """Return the indices of an axis, padded to a power of two, and the limit for masks: None if none was added."""
    padded = max(least, pl.next_power_of_2(size))
    return jnp.arange(padded, dtype=jnp.int32), None if padded == size else size


def _load_tile(kv_ref, table, token: jax.Array, page_size: int, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Load K and V [tile, D] at the positions `token` of a row. Positions after `last` read the token at `last`.

    `table(page)` reads the row's page table. A clamped gather needs no mask and reads no page after the context.
    """
    token = jnp.minimum(token, last)
    # lax.div and lax.rem: positions are not negative, and // would add code for signs.
    place = table(lax.div(token, page_size)) * page_size + lax.rem(token, page_size)
    columns, limit = _padded(kv_ref.shape[2])
    rows, columns = _grid(place, columns)
    k = _load(kv_ref, (rows, 0, columns), (None, None, limit))
    v = _load(kv_ref, (rows, 1, columns), (None, None, limit)) if kv_ref.shape[1] == 2 else k
    return k, v


def _decode_kernel(
    q_ref,  # [G, D]
    kv_ref,  # [P * page_size, 2, D]  of this kv head
    table_ref,  # int32 [max_pages]
    len_ref,  # int32 []
    out_ref,  # [G, D]
    lse_ref,  # float32 [G]
    *,
    spec: AttentionSpec,
    page_size: int,
    tile: int,
    splits: int,
) -> None:
    kv_len = len_ref[()]
    (heads, head_limit), (columns, column_limit) = _padded(q_ref.shape[0], TENSOR_CORE_ROWS), _padded(q_ref.shape[1])
    own, limits = _grid(heads, columns), (head_limit, column_limit)
    q = _load(q_ref, own, limits)
    oldest = 0 if spec.sliding_window is None else jnp.maximum(kv_len - spec.sliding_window, 0)
    first, last = oldest // tile, pl.cdiv(kv_len, tile)
    share = pl.cdiv(last - first, splits)  # tiles per split
    begin = first + pl.program_id(2) * share

    def step(index: jax.Array, state: _Softmax) -> _Softmax:
        """Add tile `index`, an int32 [], to the softmax."""
        token = index * tile + jnp.arange(tile, dtype=jnp.int32)
        seen = (token < kv_len) & (token >= oldest)
        k, v = _load_tile(kv_ref, lambda page: table_ref[page], token, page_size, kv_len - 1)
        v = jnp.where(seen[:, None], v, jnp.zeros_like(v))  # 0 * NaN is NaN: the page may hold another request's NaN
        return _add_tile(state, q, k, v, spec, seen[None, :])

    state = lax.fori_loop(begin, jnp.minimum(begin + share, last), step, _empty(*q.shape))
    out, lse = _finish(state)
    plt.store(out_ref.at[own], out.astype(out_ref.dtype), mask=_mask(own, limits))
    plt.store(lse_ref.at[heads], lse, mask=_mask((heads,), (head_limit,)))


def _extend_kernel(
    q_ref,  # [T, G, D]  of this kv head
    kv_ref,  # [P * page_size, 2, D]
    row_ref,  # int32 [B]  row of each block
    first_ref,  # int32 [B]  its first token in the row; -1: an unused block
    start_ref,  # int32 [R]  a row's first token in q
    q_len_ref,  # int32 [R]
    kv_len_ref,  # int32 [R]
    table_ref,  # int32 [R, max_pages]
    out_ref,  # [T, G, D]
    lse_ref,  # float32 [T, G]
    *,
    spec: AttentionSpec,
    page_size: int,
    block: int,
    tile: int,
) -> None:
    index = pl.program_id(0)

    @pl.when(first_ref[index] >= 0)
    def _live() -> None:
        row, first = row_ref[index], first_ref[index]
        q_len, kv_len = q_len_ref[row], kv_len_ref[row]
        (heads, head_limit), (columns, column_limit) = _padded(q_ref.shape[1]), _padded(q_ref.shape[2])
        token = first + jnp.arange(block, dtype=jnp.int32)  # in the row
        place = jnp.where(token < q_len, start_ref[row] + token, q_ref.shape[0])
        own = _grid(place, heads, columns)
        limits = (q_ref.shape[0], head_limit, column_limit)
        q = _load(q_ref, own, limits).reshape(block * heads.shape[0], columns.shape[0])
        position = kv_len - q_len + first  # of the block's first token
        query = position + jnp.arange(q.shape[0], dtype=jnp.int32) // heads.shape[0]
        oldest = 0 if spec.sliding_window is None else jnp.maximum(position - spec.sliding_window + 1, 0)

        def step(index: jax.Array, state: _Softmax, masked: bool) -> _Softmax:
            """Add tile `index`, an int32 [], to the softmax; masked: some queries do not see all of it."""
            context = index * tile + jnp.arange(tile, dtype=jnp.int32)
            k, v = _load_tile(kv_ref, lambda page: table_ref[row, page], context, page_size, kv_len - 1)
            if not masked:
                return _add_tile(state, q, k, v, spec, None)
            live = (context < kv_len) & (context >= oldest)
            v = jnp.where(live[:, None], v, jnp.zeros_like(v))
            seen = (context[None, :] <= query[:, None]) & live[None, :]
            if spec.sliding_window is not None:
                seen &= context[None, :] > query[:, None] - spec.sliding_window
            return _add_tile(state, q, k, v, spec, seen)

        begin, end = oldest // tile, pl.cdiv(jnp.minimum(kv_len, position + block), tile)
        # Tiles that every query of the block sees entirely: those before the diagonal, if there is no window.
        whole = begin if spec.sliding_window is not None else jnp.minimum((position + 1) // tile, end)
        state = lax.fori_loop(begin, whole, functools.partial(step, masked=False), _empty(*q.shape))
        state = lax.fori_loop(whole, end, functools.partial(step, masked=True), state)
        out, lse = _finish(state)
        shape = own[0].shape
        plt.store(out_ref.at[own], out.reshape(shape).astype(out_ref.dtype), mask=_mask(own, limits))
        own = _grid(place, heads)
        plt.store(lse_ref.at[own], lse.reshape(shape[:2]), mask=_mask(own, limits[:2]))
