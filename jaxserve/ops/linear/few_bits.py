"""Linear layers with quantized weights of 8 and 4 bits for NVIDIA GPUs, in Pallas lowered through Triton.

One kernel serves all forms of `ops.quantized`. A program reads a tile of quantized values [outputs, values],
dequantizes them to the activations' dtype in registers, and multiplies them by the rows of x with float32 sums. Grid
(rows, outputs, splits of K): programs that run together share a weight's tile. A product reads only the bytes of
quantized values and scales. XLA's form writes the dequantized weight to memory and reads it again: 5 bytes a weight
instead of 1, see benchmarks/compiled. The dequantized values equal `Quantized.astype`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from jaxserve.ops.linear import codes
from jaxserve.ops.quantized import Quantized, scale_numbers
from jaxserve.ops.triton_arrays import dot, index_grid, load, mask_of

# Rows of x. Each tile of 128 rows dequantizes the weight again, with some 6 instructions or 0.2 ps a value on an
# H200. Four tiles take as long as the 4 bytes a value that XLA's form writes and reads.
MAX_ROWS = 512
_DTYPES = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Tile:
    """Sizes of a program: outputs, rows of x, bytes of a weight's row at a time, and the compiler's pipelining."""

    outputs: int
    rows: int
    bytes: int
    warps: int
    stages: int


# By the largest number of rows of x. More outputs share the loads of rows, which for 128 rows exceed the weight's.
_TILES = ((16, Tile(32, 16, 128, 4, 5)), (32, Tile(64, 32, 128, 4, 4)), (64, Tile(64, 64, 64, 4, 4)))
_LARGE = Tile(128, 128, 64, 8, 3)
_PROGRAMS = 264  # two for each of an H200's processors: K is split until there are so many


def takes(x: jax.Array) -> bool:
    """Return whether the kernel accepts rows x [T, K]."""
    return x.dtype in _DTYPES and x.shape[0] <= MAX_ROWS


def matmul(x: jax.Array, w: Quantized, out_dtype: DTypeLike, *, interpret: bool = False) -> jax.Array:
    """Multiply x [T, K] by w [*out, K] transposed -> [T, *out] in `out_dtype`. interpret: run slowly, on any device"""
    rows, shape, w = x.shape[0], w.shape[:-1], w.matrix()
    outputs, columns = w.values.shape
    tile = next((tile for most, tile in _TILES if rows <= most), _LARGE)
    width = columns // w.scales.shape[1]  # bytes of a group
    step = _step(tile.bytes, width)
    splits = _splits(pl.cdiv(outputs, tile.outputs) * pl.cdiv(rows, tile.rows), pl.cdiv(columns, step))
    halves = codes.halves(x, w.block) if w.packed else x[None]
    leaves = jax.tree.leaves(w)
    result = (splits, rows, outputs)
    y = pl.pallas_call(
        functools.partial(_kernel, tile=tile, step=step, width=width, splits=splits, is_e2m1=w.is_e2m1),
        grid=(pl.cdiv(rows, tile.rows), pl.cdiv(outputs, tile.outputs), splits),
        in_specs=[_whole(halves.shape), *(_whole(leaf.shape) for leaf in leaves)],
        out_specs=_whole(result),
        out_shape=jax.ShapeDtypeStruct(result, jnp.float32 if splits > 1 else out_dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="linear_few_bits",
    )(halves, *leaves)
    y = y[0] if splits == 1 else y.sum(axis=0).astype(out_dtype)
    return y.reshape(rows, *shape)


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _step(most: int, width: int) -> int:
    """Return the bytes of a row to read at a time: a power of two that divides a group, or some whole groups."""
    if width & (width - 1):
        return min(most, width & -width)
    return most


def _splits(programs: int, steps: int) -> int:
    """Return the number of parts into which K is split: a power of two, with at least four steps for each."""
    splits = 1
    while programs * splits * 2 <= _PROGRAMS and steps >= 8 * splits:
        splits *= 2
    return splits


def _kernel(
    x_ref, values_ref, scales_ref, *refs, tile: Tile, step: int, width: int, splits: int, is_e2m1: bool
) -> None:
    *zeros_ref, out_ref = refs
    outputs, columns = values_ref.shape
    rows = x_ref.shape[1]
    steps = pl.cdiv(pl.cdiv(columns, step), splits)
    split = pl.program_id(2)
    own = pl.program_id(1) * tile.outputs + jnp.arange(tile.outputs, dtype=jnp.int32)
    row = pl.program_id(0) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
    own_limit = None if outputs % tile.outputs == 0 else outputs
    row_limit = None if rows % tile.rows == 0 else rows
    column_limit = None if columns % (step * splits) == 0 else columns

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        """Add the products of one step: total [outputs, rows]."""
        first = (split * steps + index) * step
        column = first + jnp.arange(step, dtype=jnp.int32)
        values = load(values_ref, index_grid(own, column), (own_limit, column_limit))
        count = max(1, step // width)
        group = first // width + jnp.arange(count, dtype=jnp.int32)
        group_limit = None if column_limit is None else scales_ref.shape[1]
        shared = [load(ref, index_grid(own, group), (own_limit, group_limit)) for ref in (scales_ref, *zeros_ref)]
        scale, *zero = [_spread(scale_numbers(each), step) for each in shared]
        for half, numbers in enumerate(codes.wide(values, scale, zero[0] if zero else None, is_e2m1=is_e2m1)):
            x = load(x_ref, (half, *index_grid(row, column)), (None, row_limit, column_limit))
            total += dot(numbers.astype(x.dtype), x, (1, 1))
        return total

    total = lax.fori_loop(0, steps, add, jnp.zeros((tile.outputs, tile.rows), jnp.float32))
    place = index_grid(own, row)
    mask = mask_of(place, (own_limit, row_limit))
    plt.store(out_ref.at[split, place[1], place[0]], total.astype(out_ref.dtype), mask=mask)


def _spread(shared: jax.Array, step: int) -> jax.Array:
    """Repeat each group's scale or zero for its values: [outputs, groups] -> [outputs, step]."""
    outputs, count = shared.shape
    return lax.broadcast_in_dim(shared, (outputs, count, step // count), (0, 1)).reshape(outputs, step)
