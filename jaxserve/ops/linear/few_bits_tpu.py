"""Linear layers with quantized weights of 8 and 4 bits for TPUs, in Pallas lowered through Mosaic.

One kernel serves all forms of `ops.quantized`. Grid (outputs, pieces of K), the pieces one after the other. A program
gets a tile of quantized values [outputs, lanes], dequantizes them to the activations' dtype in the chip's memory, and
multiplies all rows of x by them, so each value is read and dequantized once. XLA's form writes the dequantized weight
to HBM and reads it again: 5 bytes a weight instead of 1, see benchmarks/compiled. The dequantized values equal
`Quantized.astype`.

Scales are read 128 groups at a time, as many as a register has lanes, and a gather along the lanes repeats each scale
for the values of its group.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxserve.ops.linear import codes
from jaxserve.ops.linear.tpu_layout import multiply_as_kept
from jaxserve.ops.quantized import Quantized, scale_numbers

# Rows of x. A tile of x, of the sums and of the result, each twice so that the next tile is copied meanwhile, take 10
# of the 16 MiB that a program may use on a v5e.
MAX_TPU_ROWS = 1024
TPU_LANES = 128
_OUTPUTS = 512  # of a tile
_FEW_ROWS = 128  # with so few a tile of 1 MiB hides the 0.3 us that a program of the grid costs


def takes(x: jax.Array) -> bool:
    """Return whether the kernel accepts rows x [T, K]."""
    return x.dtype == jnp.bfloat16 and x.shape[0] <= MAX_TPU_ROWS


def matmul(x: jax.Array, w: Quantized, out_dtype: DTypeLike, *, interpret: bool = False) -> jax.Array:
    """Multiply x [T, K] by w [*out, K] transposed -> [T, *out] in `out_dtype`. interpret: run slowly, on any device

    If a row of values is not a multiple of 128 bytes, XLA dequantizes it.
    """
    return multiply_as_kept(lambda matrix: _matmul(x, matrix, out_dtype, interpret), w)


def _matmul(x: jax.Array, w: Quantized, out_dtype: DTypeLike, interpret: bool) -> jax.Array:
    """Multiply x [T, K] by w [N, K] transposed -> [T, N]."""
    rows = x.shape[0]
    outputs, columns = w.values.shape
    if columns % TPU_LANES:
        return lax.dot_general(x, w.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
    width = columns // w.scales.shape[1]  # bytes of a group
    # at most as many bytes as the 128 groups of a block of scales have
    lanes = _lanes(columns, min(2048 if rows <= _FEW_ROWS else 512, width * TPU_LANES))
    parts = codes.halves(x, w.block) if w.packed else x[None]
    values, *shared = jax.tree.leaves(w)
    groups = pl.BlockSpec((_OUTPUTS, TPU_LANES), lambda n, k: (n, k * lanes // (width * TPU_LANES)))
    steps = columns // lanes
    return pl.pallas_call(
        functools.partial(_kernel, width=width, steps=steps, is_e2m1=w.is_e2m1),
        grid=(pl.cdiv(outputs, _OUTPUTS), steps),
        in_specs=[
            pl.BlockSpec((len(parts), rows, lanes), lambda n, k: (0, 0, k)),
            pl.BlockSpec((_OUTPUTS, lanes), lambda n, k: (n, k)),
            *(groups for _ in shared),
        ],
        out_specs=pl.BlockSpec((rows, _OUTPUTS), lambda n, k: (0, n)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        scratch_shapes=[pltpu.VMEM((rows, _OUTPUTS), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="linear_few_bits",
    )(parts, values, *shared)


def _lanes(columns: int, most: int) -> int:
    """Return the bytes of a row in a tile: the largest power of two, at most `most`, that divides the row."""
    return min(most, columns & -columns)


def _kernel(x_ref, values_ref, scales_ref, *refs, width: int, steps: int, is_e2m1: bool) -> None:
    *zeros_ref, out_ref, total_ref = refs
    outputs, lanes = values_ref.shape
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _() -> None:
        total_ref[...] = jnp.zeros_like(total_ref)

    scales = scale_numbers(scales_ref[...])
    pieces: list[tuple[jax.Array, ...]] = []  # of 128 lanes; each of one or two halves [outputs, 128]
    for first in range(0, lanes, TPU_LANES):
        lane = step * lanes + first + lax.broadcasted_iota(jnp.int32, (outputs, TPU_LANES), 1)
        group = (lane // width) % TPU_LANES
        scale, *zero = [repeated(each, group) for each in (scales, *(ref[...] for ref in zeros_ref))]
        values = values_ref[:, first : first + TPU_LANES]
        numbers = codes.wide(values, scale, zero[0] if zero else None, is_e2m1=is_e2m1)
        pieces.append(tuple(each.astype(x_ref.dtype) for each in numbers))
    for half, parts in enumerate(zip(*pieces, strict=True)):
        dims = (((1,), (1,)), ((), ()))
        tile = jnp.concatenate(parts, axis=1)
        total_ref[...] += lax.dot_general(x_ref[half], tile, dims, preferred_element_type=jnp.float32)

    @pl.when(step == steps - 1)
    def _() -> None:
        out_ref[...] = total_ref[...].astype(out_ref.dtype)


def repeated(shared: jax.Array, group: jax.Array) -> jax.Array:
    """Return each lane's scale or zero: shared [outputs, 128], group int32 [outputs, 128] -> [outputs, 128]."""
    return jnp.take_along_axis(shared, group, axis=1, mode="promise_in_bounds")
