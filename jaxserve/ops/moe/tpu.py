"""Experts with weights of 8 and 4 bits on TPUs in Pallas, lowered through Mosaic: rows sorted by expert.

One kernel multiplies rows by their expert's weight, for all forms of `ops.quantized`. Rows are cut into chunks:

    rows        [ e0 e0 e0 e2 e5 e5 | e5 e5 e7 ... ]
    visits        e0       e2 e5      e5    e7          an expert and a chunk that has rows of it

Grid (blocks of outputs, visits). A program gets a block of one expert's values as they are, turns them into the rows'
dtype in the chip's memory, and multiplies the expert's rows of the chunk by them, a tile of rows at a time. An expert
without rows is not read, and one with rows in one chunk is read and widened once. The numbers are those of
`Quantized.astype`; a scale for all of an output's values multiplies the sum. Structure after the grouped product of
MegaBlocks (arXiv 2211.15841), whose tiles of rows are visited once for each of their experts.
"""

from __future__ import annotations

import functools
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
from jaxserve.ops.moe.experts import Activation, ExpertWeights
from jaxserve.ops.quantized import Quantized, powers

_SUBLANES = 32  # rows of bytes in a tile of the memory layout
_ALIGN = 16  # the same of 16 bits: slices of rows start there
_WEIGHT_BYTES = 1 << 20  # of a block of values, which hides the 0.3 us that a program of the grid costs
_CHUNK_BYTES = 4 << 20  # of a chunk of rows
_CHUNK_ROWS = 1024
_MEMORY = 64 << 20  # of a program; chips from v5e on have 128 MiB


@dataclass(frozen=True)
class GroupedBlocks:
    """The sizes of a program: outputs, rows of a chunk, and rows of a product."""

    outputs: int
    chunk: int
    tile: int

    @classmethod
    def of(cls, rows: int, weight: Quantized, *, one_size: bool) -> GroupedBlocks:
        """Return the sizes for so many rows. one_size: tiles do not depend on them."""
        experts, depth = weight.shape[0], weight.shape[-1]
        fit = _WEIGHT_BYTES // weight.values.shape[-1]
        outputs = 512 if fit >= 512 else 256 if fit >= 256 else TPU_LANES
        most = min(_CHUNK_ROWS, max(TPU_LANES, _CHUNK_BYTES // (2 * depth) // TPU_LANES * TPU_LANES))
        chunk = min(rows, most)
        tile = 2 * _ALIGN if rows <= experts * _ALIGN and not one_size else TPU_LANES
        return cls(outputs, chunk, min(tile, chunk))


class Visits(NamedTuple):
    """An expert and a chunk of rows of each visit, int32 [V], and which rows of the chunk are the expert's.

    `end` is 0 for what is behind the last visit; that repeats its expert and chunk, so nothing is copied for it.
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
    """Return the most visits that so many rows can need, however they are spread over the experts."""
    return min(experts, rows) + pl.cdiv(rows, chunk) - 1


def run_rows(
    rows: jax.Array, sizes: jax.Array, experts: ExpertWeights, *, activation: Activation, kernels: TpuExperts
) -> jax.Array:
    """Run bfloat16 rows [M, D], sorted by expert, through their experts -> [M, D]. Rows after sum(sizes) are undefined.

    sizes: int32 [E], rows of each expert. The weights are quantised.
    """
    count = rows.shape[0]
    rows = jnp.pad(rows, ((0, -count % (TPU_LANES if kernels.one_size else _ALIGN)), (0, 0)))
    expert = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=rows.shape[0])
    product = functools.partial(products, sizes=sizes, kernels=kernels)
    gate, up = product(rows, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 2, 1), experts.gate_up))
    if experts.gate_up_bias is not None:
        bias = jnp.take(experts.gate_up_bias, expert, axis=0).astype(gate.dtype)
        gate, up = gate + bias[..., 0], up + bias[..., 1]
    [out] = product(activation(gate, up), jax.tree.map(lambda leaf: leaf[:, None], experts.down))
    if experts.down_bias is not None:
        out = out + jnp.take(experts.down_bias, expert, axis=0).astype(out.dtype)
    return out[:count]


def products(x: jax.Array, weight: Quantized, sizes: jax.Array, kernels: TpuExperts) -> jax.Array:
    """Multiply bfloat16 x [M, K], sorted by expert, by weight [E, H, N, K] transposed -> [H, M, N].

    M is a multiple of 16, with `one_size` of 128. sizes: int32 [E], rows of each expert; what follows is undefined.
    """
    heads, outputs = weight.shape[1:3]
    rows, columns = x.shape[0], weight.values.shape[-1]
    blocks = GroupedBlocks.of(rows, weight, one_size=kernels.one_size)
    visits = Visits.of(sizes, rows, blocks.chunk)
    parts = codes.halves(x) if weight.packed else x[None]
    values, *shared = jax.tree.leaves(weight)
    turned = _outputs_are_last(outputs, columns)
    shape = blocks.outputs, columns
    tiles = pl.cdiv(outputs, blocks.outputs)

    def of_expert(n: jax.Array, visit: jax.Array, expert: Any, *_: Any) -> tuple[Any, ...]:
        """Return the block of values [E, H, N, C] that a program gets."""
        return expert[visit], lax.div(n, tiles), lax.rem(n, tiles), 0

    def outputs_last(n: jax.Array, visit: jax.Array, expert: Any, *_: Any) -> tuple[Any, ...]:
        """Return the block of an array [E, H, .., N]."""
        return expert[visit], lax.div(n, tiles), 0, lax.rem(n, tiles)

    groups = shared[0].shape[-1]
    groups = groups if turned or groups == 1 else pl.cdiv(groups, TPU_LANES) * TPU_LANES
    return pl.pallas_call(
        functools.partial(_kernel, tile=blocks.tile, turned=turned, width=weight.group * columns // weight.shape[-1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(heads * tiles, len(visits.expert)),
            in_specs=[
                pl.BlockSpec((len(parts), blocks.chunk, columns), lambda n, visit, _, chunk, *__: (0, chunk[visit], 0)),
                pl.BlockSpec((None, None, *(shape[::-1] if turned else shape)), outputs_last if turned else of_expert),
                *(pl.BlockSpec((None, None, groups, blocks.outputs), outputs_last) for _ in shared),
            ],
            out_specs=pl.BlockSpec(
                (None, blocks.chunk, blocks.outputs),
                lambda n, visit, _, chunk, *__: (lax.div(n, tiles), chunk[visit], lax.rem(n, tiles)),
            ),
            scratch_shapes=[pltpu.VMEM((len(parts), *(shape[::-1] if turned else shape)), x.dtype)],
        ),
        out_shape=jax.ShapeDtypeStruct((heads, rows, outputs), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_MEMORY),
        cost_estimate=_cost(x, weight),
        interpret=kernels.interpret,
        name="moe_few_bits",
    )(*visits, parts, values.swapaxes(2, 3) if turned else values, *(each.swapaxes(2, 3) for each in shared))


def _cost(x: jax.Array, weight: Quantized) -> pl.CostEstimate:
    """Return the work for rows x [M, K] of as many experts as there can be, for XLA's schedule."""
    experts, heads, outputs, depth = weight.shape
    rows, item = x.shape[0], x.dtype.itemsize
    read = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)) * min(rows, experts) // experts
    return pl.CostEstimate(
        flops=2 * rows * heads * outputs * depth,
        bytes_accessed=read + rows * (depth + heads * outputs) * item,
        transcendentals=0,
    )


def _outputs_are_last(outputs: int, columns: int) -> bool:
    """Return whether XLA keeps values [.., outputs, columns] with the outputs last.

    It takes the order with the least padding to its tiles of 32 x 128 bytes; any other would be a copy of the weight.
    If neither axis fits the tiles and 128 divides the experts of a device, that is yet another order with the experts
    last, and the weight is copied in every step: gpt-oss-120b, unless `mesh.expert` divides its 128 experts.
    """

    def padded(rows: int, lanes: int) -> int:
        return pl.cdiv(rows, _SUBLANES) * _SUBLANES * pl.cdiv(lanes, TPU_LANES) * TPU_LANES

    return padded(columns, outputs) < padded(outputs, columns)


def _kernel(
    expert_ref, chunk_ref, first_ref, end_ref,  # `Visits`
    x_ref,  # [1, chunk, K], of 4 bits [2, chunk, K / 2]
    values_ref,  # [outputs, C], C = K or K / 2; [C, outputs] if turned
    scales_ref,  # [groups, outputs]
    # zeros [groups, outputs] if there are any, result [chunk, outputs], wide numbers [1 or 2, ..] as the values
    *refs,
    tile: int, turned: bool, width: int,
) -> None:  # fmt: skip
    *zeros_ref, out_ref, wide_ref = refs
    visit = pl.program_id(1)
    first, end = first_ref[visit], end_ref[visit]
    mxfp4 = scales_ref.dtype == jnp.uint8
    after = scales_ref.shape[0] == 1 and not zeros_ref and not mxfp4  # the scales multiply sums

    @pl.when(end > 0)
    def _live() -> None:
        shared = [] if after else [powers(scales_ref[...]) if mxfp4 else scales_ref[...], *(z[...] for z in zeros_ref)]
        (_widen_turned if turned else _widen)(values_ref, shared, wide_ref, width, mxfp4=mxfp4)
        start = first // _ALIGN * _ALIGN

        @pl.loop(0, pl.cdiv(end - start, tile))
        def _tile(index: jax.Array) -> None:
            place = start + index * tile
            own = pl.ds(pl.multiple_of(jnp.minimum(place, out_ref.shape[0] - tile), _ALIGN), tile)
            dims = (((1,), (0 if turned else 1,)), ((), ()))
            products = (
                lax.dot_general(x_ref[half, own], wide_ref[half], dims, preferred_element_type=jnp.float32)
                for half in range(wide_ref.shape[0])
            )
            y = functools.reduce(jnp.add, products)
            y = y * scales_ref[...] if after else y
            row = own.start + lax.broadcasted_iota(jnp.int32, y.shape, 0)
            mine = (row >= jnp.maximum(first, place)) & (row < end)
            out_ref[own] = jnp.where(mine, y, out_ref[own].astype(jnp.float32)).astype(out_ref.dtype)


def _widen(values_ref, shared: Sequence[jax.Array], wide_ref, width: int, *, mxfp4: bool) -> None:
    """Write the numbers of values [outputs, C] to wide_ref [1 or 2, outputs, C].

    shared: scales and zeros [groups, outputs], if there are any. width: values that share one.
    """
    outputs, columns = values_ref.shape
    shared = [each.T for each in shared]
    for first in range(0, columns, TPU_LANES):
        own = slice(first, min(first + TPU_LANES, columns))
        # As many groups are read at a time as a register has lanes. No piece of so many values has groups of two reads.
        read = first // (width * TPU_LANES) * TPU_LANES
        group = (first + lax.broadcasted_iota(jnp.int32, (outputs, TPU_LANES), 1)) // width - read
        some = [repeated(each[:, read : read + TPU_LANES], group)[:, : own.stop - first] for each in shared]
        _write(values_ref[:, own], some, wide_ref.at[:, :, own], mxfp4)


def _widen_turned(values_ref, shared: Sequence[jax.Array], wide_ref, width: int, *, mxfp4: bool) -> None:
    """Do what `_widen` does for values [C, outputs] and wide_ref [1 or 2, C, outputs]."""
    columns, outputs = values_ref.shape
    together = 1 if width % _SUBLANES == 0 else 8  # groups at a time
    for first in range(0, columns, together * width):
        own = slice(first, min(first + together * width, columns))
        groups = slice(first // width, own.stop // width)
        some = [
            jnp.broadcast_to(each[groups, None], (groups.stop - groups.start, width, outputs)).reshape(-1, outputs)
            for each in shared
        ]
        _write(values_ref[own], some, wide_ref.at[:, own], mxfp4)


def _write(values: jax.Array, shared: Sequence[jax.Array], wide_ref, mxfp4: bool) -> None:
    """Write the numbers of values [A, B], by `shared` scales and zeros [A, B] if any, to wide_ref [1 or 2, A, B]."""
    scale, zero = (*shared, None, None)[:2]
    scale = jnp.ones((), jnp.float32) if scale is None else scale
    for half, numbers in enumerate(codes.wide(values, scale, zero, mxfp4=mxfp4)):
        wide_ref[half] = numbers.astype(wide_ref.dtype)
