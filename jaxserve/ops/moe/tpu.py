"""Routed experts on TPUs in Pallas, lowered through Mosaic: rows sorted by expert.

One kernel multiplies rows by their expert's weight, in bfloat16 or any form of `ops.quantized`. Rows are cut into
chunks:

    rows        [ e0 e0 e0 e2 e5 e5 | e5 e5 e7 ... ]
    visits        e0       e2 e5      e5    e7          an expert and a chunk that has rows of it

Grid (blocks of outputs, visits). A program gets a block of one expert's values, dequantizes it to the rows' dtype in
the chip's memory if it is quantized, and multiplies the expert's rows of the chunk by it, a tile of rows at a time. An
expert without rows is not read. An expert with rows in one chunk is read and dequantized once. The dequantized values
equal `Quantized.astype`; a scale for all of an output's values multiplies the sum. The structure follows the grouped
product of MegaBlocks (arXiv 2211.15841), whose tiles of rows are visited once for each of their experts.

XLA keeps gate and up [E, F, 2, D] in bfloat16 as pairs, one word of 32 bits each. The kernel separates them in the
chip's memory, because any other order would be a copy of the weight in every step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.ops.linear import TpuExperts, codes
from jaxserve.ops.linear.few_bits_tpu import TPU_LANES, repeated
from jaxserve.ops.moe.experts import Activation, ExpertWeights, unscaled
from jaxserve.ops.native import Weight
from jaxserve.ops.quantized import Quantized, scale_numbers

_SUBLANES = 32  # rows of bytes in a tile of the memory layout
_WIDE_SUBLANES = 8  # the same of bfloat16, whose rows are pairs
_ALIGN = 16  # the same of 16 bits: slices of rows start there
_WEIGHT_BYTES = 1 << 20  # of a block of values, which hides the 0.3 us that a program of the grid costs
# Bytes of a block if the rows are several chunks: each block of outputs reads all rows. With `one_size` always.
_MANY_BYTES = 8 << 20
_CHUNK_BYTES = 16 << 20  # bytes of a chunk of rows: with more chunks an expert is read more often
_CHUNK_ROWS = 1024
_XLA_ROWS = 512  # of experts that XLA keeps last
_MEMORY = 64 << 20  # of a program; a v5e and a v6e have 128 MiB, a v5p and a TPU7x 64


@dataclass(frozen=True)
class GroupedBlocks:
    """The sizes of a program: outputs, rows of a chunk, and rows of a product."""

    outputs: int
    chunk: int
    tile: int

    @classmethod
    def of(cls, rows: int, weight: Weight, *, pairs: bool, one_size: bool) -> GroupedBlocks:
        """Return the sizes for so many rows.

        pairs: see `products`. one_size: `outputs` and `tile` do not depend on the rows, of which there are 128 or more.
        """
        experts, depth = weight.shape[0], weight.shape[-1]
        values = _values(weight)
        pair = 1 + pairs
        most = min(_CHUNK_ROWS, max(TPU_LANES, _CHUNK_BYTES // (2 * depth) // TPU_LANES * TPU_LANES))
        chunk = min(rows, most)
        fit = _WEIGHT_BYTES // (values.shape[-1] * values.dtype.itemsize * pair)
        if rows > chunk or one_size:
            fit = _MANY_BYTES // (2 * depth * pair)
        outputs = 512 if fit >= 512 else 256 if fit >= 256 else TPU_LANES
        tile = 2 * _ALIGN if rows <= experts * _ALIGN and not one_size else TPU_LANES
        return cls(outputs, chunk, min(tile, chunk))


class Visits(NamedTuple):
    """An expert and a chunk of rows for each visit, int32 [V], and the range of the chunk's rows that are the expert's.

    Entries after the last visit have `end` 0 and repeat its expert and chunk, so nothing is copied for them.
    """

    expert: jax.Array
    chunk: jax.Array
    first: jax.Array
    end: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, rows: int, chunk: int) -> Visits:
        """Return the visits of `rows` rows sorted by expert, sizes int32 [E]."""
        experts, index = sizes.shape[0], jnp.arange(_most_visits(sizes.shape[0], rows, chunk), dtype=jnp.int32)
        ends = jnp.cumsum(sizes)
        starts = ends - sizes
        count = jnp.where(sizes > 0, (ends - 1) // chunk - starts // chunk + 1, 0)
        visited = jnp.cumsum(count)
        visit = jnp.clip(index, 0, jnp.maximum(visited[-1] - 1, 0))
        expert = jnp.sum(visit[:, None] >= visited[None, :], axis=1, dtype=jnp.int32)
        expert = jnp.minimum(expert, experts - 1)
        at = (starts // chunk + count - visited)[expert] + visit
        end = jnp.where(index < visited[-1], jnp.minimum(ends[expert] - at * chunk, chunk), 0)
        return cls(expert, at, jnp.maximum(starts[expert] - at * chunk, 0), end)


def _most_visits(experts: int, rows: int, chunk: int) -> int:
    """Return the largest number of visits that so many rows can need, however they are spread over the experts."""
    return min(experts, rows) + pl.cdiv(rows, chunk) - 1


def takes(rows: jax.Array, experts: ExpertWeights, kernels: TpuExperts) -> bool:
    """Return whether the kernel runs rows [M, D]: XLA's form is slower, or must not run them because of `one_size`.

    XLA's form is faster for few rows if both weights are bfloat16 and XLA keeps them with the experts last, see
    `_outputs_are_last`: the kernel would copy them, which moves more bytes than a product of every row with every
    expert. A quantized weight would be dequantized by XLA in every step.
    """
    count, outputs, depth = experts.down.shape
    last = count % TPU_LANES == 0 and outputs % TPU_LANES > 0 and depth % TPU_LANES > 0
    wide = not (isinstance(experts.down, Quantized) or isinstance(experts.gate_up, Quantized))
    return kernels.one_size or not (wide and last and rows.shape[0] <= _XLA_ROWS)


def run_rows(
    rows: jax.Array, sizes: jax.Array, experts: ExpertWeights, *, activation: Activation, kernels: TpuExperts
) -> jax.Array:
    """Run bfloat16 rows [M, D], sorted by expert, through their experts -> [M, D]. Rows after sum(sizes) are undefined.

    sizes: int32 [E], rows of each expert. The weights are bfloat16 or quantized.
    """
    count = rows.shape[0]
    rows = jnp.pad(rows, ((0, -count % (TPU_LANES if kernels.one_size else _ALIGN)), (0, 0)))
    expert = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=rows.shape[0])
    product = functools.partial(products, sizes=sizes, kernels=kernels)
    pairs = _pairs_are_together(experts.gate_up)
    weight, scale = unscaled(experts.gate_up)
    gate_up = weight if pairs else jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 2, 1), weight)
    gate, up = product(rows, gate_up, pairs=pairs)
    if scale is not None:
        own = jnp.take(scale[..., 0], expert, axis=0)
        gate, up = ((half * own[..., i]).astype(half.dtype) for i, half in enumerate((gate, up)))
    if experts.gate_up_bias is not None:
        bias = jnp.take(experts.gate_up_bias, expert, axis=0).astype(gate.dtype)
        gate, up = gate + bias[..., 0], up + bias[..., 1]
    weight, scale = unscaled(experts.down)
    [out] = product(activation(gate, up), jax.tree.map(lambda leaf: leaf[:, None], weight))
    if scale is not None:
        out = (out * jnp.take(scale[..., 0], expert, axis=0)).astype(out.dtype)
    if experts.down_bias is not None:
        out = out + jnp.take(experts.down_bias, expert, axis=0).astype(out.dtype)
    return out[:count]


def products(x: jax.Array, weight: Weight, sizes: jax.Array, kernels: TpuExperts, *, pairs: bool = False) -> jax.Array:
    """Multiply bfloat16 x [M, K], sorted by expert, by weight [E, H, N, K] transposed -> [H, M, N].

    M is a multiple of 16, with `one_size` of 128. sizes: int32 [E], rows of each expert; rows after them are undefined.
    pairs: the weight is bfloat16 [E, N, 2, K], K a multiple of 128.
    """
    heads, outputs = weight.shape[2:0:-1] if pairs else weight.shape[1:3]
    rows, columns = x.shape[0], _values(weight).shape[-1]
    blocks = GroupedBlocks.of(rows, weight, pairs=pairs, one_size=kernels.one_size)
    visits = Visits.of(sizes, rows, blocks.chunk)
    parts = codes.halves(x, weight.block) if isinstance(weight, Quantized) and weight.packed else x[None]
    values, *shared = jax.tree.leaves(weight)
    transposed = not pairs and _outputs_are_last(outputs, columns, _SUBLANES if shared else _WIDE_SUBLANES)
    tiles = pl.cdiv(outputs, blocks.outputs)

    def of_expert(n: jax.Array, visit: jax.Array, expert: Any, *_: Any) -> tuple[Any, ...]:
        """Return the block of values [E, H, N, C] that a program reads."""
        return expert[visit], lax.div(n, tiles), lax.rem(n, tiles), 0

    def outputs_last(n: jax.Array, visit: jax.Array, expert: Any, *_: Any) -> tuple[Any, ...]:
        """Return the block of an array [E, H, .., N]."""
        return expert[visit], lax.div(n, tiles), 0, lax.rem(n, tiles)

    groups = shared[0].shape[-1] if shared else 0
    width = columns // groups if shared else 0
    groups = groups if transposed or groups == 1 else pl.cdiv(groups, TPU_LANES) * TPU_LANES
    block = (columns, blocks.outputs) if transposed else (blocks.outputs, columns)
    of_values = pl.BlockSpec((None, None, *block), outputs_last if transposed else of_expert)
    if pairs:
        of_values = pl.BlockSpec(
            (1, blocks.outputs, heads, columns), lambda n, visit, expert, *_: (expert[visit], n, 0, 0)
        )
    wide = max(len(parts), 1 + pairs)
    grid = tiles if pairs else heads * tiles, len(visits.expert)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            tile=blocks.tile,
            transposed=transposed,
            width=width,
            is_e2m1=isinstance(weight, Quantized) and weight.is_e2m1,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=grid,
            in_specs=[
                pl.BlockSpec((len(parts), blocks.chunk, columns), lambda n, visit, _, chunk, *__: (0, chunk[visit], 0)),
                of_values,
                *(pl.BlockSpec((None, None, groups, blocks.outputs), outputs_last) for _ in shared),
            ],
            out_specs=pl.BlockSpec(
                (1 + pairs, blocks.chunk, blocks.outputs),
                lambda n, visit, _, chunk, *__: (lax.div(n, tiles), chunk[visit], lax.rem(n, tiles)),
            ),
            scratch_shapes=[pltpu.VMEM((wide, *block), x.dtype)] if shared or pairs else [],
        ),
        out_shape=jax.ShapeDtypeStruct((heads, rows, outputs), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_MEMORY),
        cost_estimate=_cost(x, weight, blocks, grid[0]),
        interpret=kernels.interpret,
        name="moe_few_bits" if shared else "moe_wide",
    )(*visits, parts, values.swapaxes(2, 3) if transposed else values, *(each.swapaxes(2, 3) for each in shared))


def _values(weight: Weight) -> jax.Array:
    return weight.values if isinstance(weight, Quantized) else weight


def _cost(x: jax.Array, weight: Weight, blocks: GroupedBlocks, programs: int) -> pl.CostEstimate:
    """Return the work for rows x [M, K] of as many experts as there can be, for XLA's schedule.

    programs: blocks of outputs, each of which reads the rows again unless they are one chunk.
    """
    experts, depth = weight.shape[0], weight.shape[-1]
    results = math.prod(weight.shape[1:-1])  # of a row
    rows, item = x.shape[0], x.dtype.itemsize
    visits = _most_visits(experts, rows, blocks.chunk)
    read = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)) * visits // experts
    times = programs if rows > blocks.chunk else 1
    return pl.CostEstimate(
        flops=2 * rows * results * depth,
        bytes_accessed=read + rows * (times * depth + results) * item,
        transcendentals=0,
    )


def _outputs_are_last(outputs: int, columns: int, sublanes: int) -> bool:
    """Return whether XLA keeps values [.., outputs, columns] with the outputs last.

    XLA takes the order with the least padding to its tiles of `sublanes` x 128; any other order copies the weight. If
    neither axis fits the tiles and 128 divides the experts of a device, XLA puts the experts last, and the weight is
    copied in every step: gpt-oss-120b, unless `mesh.expert` divides its 128 experts.
    """

    def padded(rows: int, lanes: int) -> int:
        return pl.cdiv(rows, sublanes) * sublanes * pl.cdiv(lanes, TPU_LANES) * TPU_LANES

    return padded(columns, outputs) < padded(outputs, columns)


def _pairs_are_together(gate_up: Weight) -> bool:
    """Return whether the kernel reads gate and up [E, F, 2, D] as the pairs that XLA keeps in bfloat16."""
    return not isinstance(gate_up, Quantized) and gate_up.shape[-1] % TPU_LANES == 0


def _kernel(
    expert_ref, chunk_ref, first_ref, end_ref,  # `Visits`
    x_ref,  # [1, chunk, K], of 4 bits [2, chunk, K / 2]
    values_ref,  # [outputs, C], C = K or K / 2; [C, outputs] if transposed; of pairs [1, outputs, 2, K]
    # If quantized: scales [groups, outputs], and zeros if there are any. Always: the result [1, chunk, outputs], for
    # pairs [2, chunk, outputs]. If quantized: dequantized values [1 or 2, ..]; for pairs halves [2, outputs, K].
    *refs,
    tile: int, transposed: bool, width: int, is_e2m1: bool,
) -> None:  # fmt: skip
    visit = pl.program_id(1)
    first, end = first_ref[visit], end_ref[visit]
    few, pairs = values_ref.dtype != x_ref.dtype, len(values_ref.shape) > 2
    *shared_refs, out_ref = refs[:-1] if few or pairs else refs
    halves = [refs[-1].at[half] for half in range(refs[-1].shape[0])] if few or pairs else [values_ref]
    wide = [halves] if few else [[half] for half in halves]  # of each head
    # The scales multiply sums.
    after = len(shared_refs) == 1 and shared_refs[0].shape[0] == 1 and shared_refs[0].dtype == jnp.float32

    @pl.when(end > 0)
    def _live() -> None:
        if few:
            shared = [] if after else [scale_numbers(ref[...]) for ref in shared_refs]
            (_widen_transposed if transposed else _widen)(values_ref, shared, refs[-1], width, is_e2m1=is_e2m1)
        elif pairs:
            _separate(values_ref, refs[-1])
        start = first // _ALIGN * _ALIGN

        @pl.loop(0, pl.cdiv(end - start, tile))
        def _tile(index: jax.Array) -> None:
            place = start + index * tile
            own = pl.ds(pl.multiple_of(jnp.minimum(place, out_ref.shape[1] - tile), _ALIGN), tile)
            dims = (((1,), (0 if transposed else 1,)), ((), ()))
            for head, parts in enumerate(wide):
                products = (
                    lax.dot_general(x_ref[part, own], numbers[...], dims, preferred_element_type=jnp.float32)
                    for part, numbers in enumerate(parts)
                )
                y = functools.reduce(jnp.add, products)
                y = y * shared_refs[0][...] if after else y
                row = own.start + lax.broadcasted_iota(jnp.int32, y.shape, 0)
                mine = (row >= jnp.maximum(first, place)) & (row < end)
                out_ref[head, own] = jnp.where(mine, y, out_ref[head, own].astype(jnp.float32)).astype(out_ref.dtype)


def _separate(values_ref, halves_ref) -> None:
    """Write the halves of pairs [1, outputs, 2, K] to halves_ref [2, outputs, K], both bfloat16.

    XLA keeps the two values of a pair in one word of 32 bits, the first in the low half.
    """
    _, outputs, _, columns = values_ref.shape
    steps = columns // TPU_LANES
    words = values_ref.bitcast(jnp.int32).reshape(outputs * steps, TPU_LANES)
    for step in range(steps):
        pair = words[pl.ds(step, outputs, steps)]
        own = slice(step * TPU_LANES, (step + 1) * TPU_LANES)
        for half, bits in enumerate((pair << 16, pair & -(1 << 16))):
            halves_ref[half, :, own] = lax.bitcast_convert_type(bits, jnp.float32).astype(halves_ref.dtype)


def _widen(values_ref, shared: Sequence[jax.Array], wide_ref, width: int, *, is_e2m1: bool) -> None:
    """Dequantize values [outputs, C] to wide_ref [1 or 2, outputs, C].

    shared: scales and zeros [groups, outputs], if there are any. width: values that share a scale
    """
    outputs, columns = values_ref.shape
    shared = [each.T for each in shared]
    for first in range(0, columns, TPU_LANES):
        own = slice(first, min(first + TPU_LANES, columns))
        # As many groups are read at a time as a register has lanes. A piece's groups are all in one such read.
        read = first // (width * TPU_LANES) * TPU_LANES
        group = (first + lax.broadcasted_iota(jnp.int32, (outputs, TPU_LANES), 1)) // width - read
        some = [repeated(each[:, read : read + TPU_LANES], group)[:, : own.stop - first] for each in shared]
        _write(values_ref[:, own], some, wide_ref.at[:, :, own], is_e2m1)


def _widen_transposed(values_ref, shared: Sequence[jax.Array], wide_ref, width: int, *, is_e2m1: bool) -> None:
    """Dequantize values [C, outputs] to wide_ref [1 or 2, C, outputs], as `_widen` does."""
    columns, outputs = values_ref.shape
    together = 1 if width % _SUBLANES == 0 else 8  # groups at a time
    for first in range(0, columns, together * width):
        own = slice(first, min(first + together * width, columns))
        groups = slice(first // width, own.stop // width)
        some = [
            jnp.broadcast_to(each[groups, None], (groups.stop - groups.start, width, outputs)).reshape(-1, outputs)
            for each in shared
        ]
        _write(values_ref[own], some, wide_ref.at[:, own], is_e2m1)


def _write(values: jax.Array, shared: Sequence[jax.Array], wide_ref, is_e2m1: bool) -> None:
    """Dequantize values [A, B] by `shared`, scales and maybe zeros [A, B], to wide_ref [1 or 2, A, B]."""
    scale, zero = (*shared, None, None)[:2]
    scale = jnp.ones((), jnp.float32) if scale is None else scale
    for half, numbers in enumerate(codes.wide(values, scale, zero, is_e2m1=is_e2m1)):
        wide_ref[half] = numbers.astype(wide_ref.dtype)
