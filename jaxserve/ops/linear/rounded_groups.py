"""Linear layers with activations and weights of 8 bits, both in groups of K, for Hopper in Pallas Mosaic GPU.

Triton cannot do this: Pallas cannot tell it that E4M3 may be summed in fewer bits than float32, so it would multiply in
float16.

Grid (outputs, rows): programs that run together share a weight's tile. A program has three warpgroups. The memory
warpgroup copies tiles of 128 values of K, and their scales, into a ring buffer of `_STAGES` stages. The two others
multiply from there by wgmma, 64 rows each, multiply each tile's product by the scales of its rows and outputs, and add
it in float32. wgmma sums E4M3 in fewer bits, but here only over 128 values. While one of the two scales, the other
multiplies. Only the result is written.

    memory    wait for stage free -> copy x, w and scales -> (hardware arrives at ready)
    compute   wait ready -> multiply -> arrive free -> scale and add
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxserve.ops.quantized import GROUP_NUMBERS, TILE_OUTPUTS, Quantized, Rounded, sum_dtype

_STAGES = 4
_SWIZZLE = 128  # bytes
_ROWS = 128  # of a program
_WARPGROUP = 64  # rows of a wgmma
_COPIES = 4  # of a stage: x, w and the scales of both


def matmul(x: Rounded, w: Quantized, out_dtype: DTypeLike, *, interpret: bool = False) -> jax.Array:
    """Multiply rows [T, K] by w [N, K] transposed -> [T, N] in `out_dtype`. N is a multiple of TILE_OUTPUTS.

    x and w have the same groups, each a multiple of 128 values. interpret: run slowly, on any device, with jax 0.11
    """
    rows, outputs = len(x.values), len(w.values)
    behind = -rows % _ROWS
    dtype = x.values.dtype
    tiled = _tiled(dtype)
    kernel = plgpu.kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct((rows + behind, outputs), out_dtype),
        scratch_types={
            "x_smem": plgpu.SMEM((_STAGES, _ROWS, GROUP_NUMBERS), dtype, transforms=tiled),
            "w_smem": plgpu.SMEM((_STAGES, TILE_OUTPUTS, GROUP_NUMBERS), dtype, transforms=tiled),
            "x_scales_smem": plgpu.SMEM((_STAGES, _ROWS), jnp.float32),
            "w_scales_smem": plgpu.SMEM((_STAGES, TILE_OUTPUTS), jnp.float32),
            "out_smem": plgpu.SMEM((_ROWS, TILE_OUTPUTS), out_dtype, transforms=_tiled(out_dtype)),
            "ready": plgpu.Barrier(num_arrivals=_COPIES, num_barriers=_STAGES),
            "free": plgpu.Barrier(num_arrivals=_ROWS // _WARPGROUP, num_barriers=_STAGES),
        },
        grid=(outputs // TILE_OUTPUTS, (rows + behind) // _ROWS),
        grid_names=("output", "row"),
        num_threads=1 + _ROWS // _WARPGROUP,
        thread_name="warpgroup",
        # InterpretGPUParams exists since jax 0.11.
        interpret=plgpu.InterpretGPUParams() if interpret else False,  # pyright: ignore[reportAttributeAccessIssue]
    )
    x = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, behind), (0, 0))), x)
    return kernel(x.values, x.scales.T, w.values, w.scales.T)[:rows]


def _tiled(dtype: DTypeLike) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Return the layout of a tile in shared memory."""
    return plgpu.TilingTransform((8, _SWIZZLE // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(_SWIZZLE)


def _kernel(
    x_ref,  # [T, K], T a multiple of _ROWS
    x_scales_ref,  # float32 [groups, T]
    w_ref,  # [N, K]
    w_scales_ref,  # float32 [groups, N]
    out_ref,  # [T, N]
    *,
    x_smem,
    w_smem,
    x_scales_smem,
    w_scales_smem,
    out_smem,
    ready,
    free,
) -> None:
    steps = x_ref.shape[1] // GROUP_NUMBERS
    per = steps // x_scales_ref.shape[0]  # steps of a group
    rows = pl.ds(lax.axis_index("row") * _ROWS, _ROWS)
    outputs = pl.ds(lax.axis_index("output") * TILE_OUTPUTS, TILE_OUTPUTS)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == _ROWS // _WARPGROUP)
    def _memory() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def copy_tile(step: jax.Array) -> None:
            """Copy the tiles of `step`, an int32 [], to its stage."""
            slot, columns, group = lax.rem(step, _STAGES), pl.ds(step * GROUP_NUMBERS, GROUP_NUMBERS), step // per
            plgpu.copy_gmem_to_smem(x_ref.at[rows, columns], x_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(w_ref.at[outputs, columns], w_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(x_scales_ref.at[group, rows], x_scales_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(w_scales_ref.at[group, outputs], w_scales_smem.at[slot], ready.at[slot])

        @pl.loop(0, min(steps, _STAGES))
        def _fill(step: jax.Array) -> None:
            copy_tile(step)

        @pl.loop(_STAGES, steps)
        def _refill(step: jax.Array) -> None:
            plgpu.barrier_wait(free.at[lax.rem(step, _STAGES)])
            copy_tile(step)

        @pl.loop(max(steps - _STAGES, 0), steps)
        def _drain(step: jax.Array) -> None:  # every arrival must be waited for before the barriers are freed
            plgpu.barrier_wait(free.at[lax.rem(step, _STAGES)])

    @pl.when(warpgroup < _ROWS // _WARPGROUP)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        own = pl.ds(warpgroup * _WARPGROUP, _WARPGROUP)
        shape = (_WARPGROUP, TILE_OUTPUTS)

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            """Add the products of `step`, an int32 []: total float32 [64, TILE_OUTPUTS]."""
            slot = lax.rem(step, _STAGES)
            plgpu.barrier_wait(ready.at[slot])
            sums = _wgmma(shape, x_smem.at[slot, own], w_smem.at[slot].transpose((1, 0)))
            by_row = plgpu.layout_cast(x_scales_smem[slot, own], plgpu.Layout.WGMMA.reduce(1))
            by_output = plgpu.layout_cast(w_scales_smem[slot], plgpu.Layout.WGMMA.reduce(0))
            plgpu.barrier_arrive(free.at[slot])
            scales = lax.broadcast_in_dim(by_row, shape, [0]) * lax.broadcast_in_dim(by_output, shape, [1])
            return total + sums.astype(jnp.float32) * scales

        nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(0, steps, add, nothing)
        out_smem[own] = total.astype(out_smem.dtype)
        plgpu.commit_smem()
        first = lax.axis_index("row") * _ROWS + warpgroup * _WARPGROUP
        plgpu.copy_smem_to_gmem(out_smem.at[own], out_ref.at[pl.ds(first, _WARPGROUP), outputs])
        plgpu.wait_smem_to_gmem(0)


def _wgmma(shape: tuple[int, int], a, b) -> jax.Array:
    """Multiply two operands in shared memory, wait, and return the product in registers."""

    def multiply(accumulator) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.dtype(sum_dtype(a.dtype))))  # pyright: ignore[reportPrivateImportUsage]
