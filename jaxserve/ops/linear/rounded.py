"""Linear layers whose activations are quantized to 8 bits like the weight (W8A8), on GPUs and TPUs.

An activation is value * scale: int8 with the scale max |x| / 127, or E4M3 with max |x| / 448. If the weight has one
scale for each output, the maximum is over a row, else over a row's group of K. The 8-bit values are multiplied, int8 to
int32 and E4M3 to float32, and the sums are scaled in float32. XLA may sum E4M3 in fewer bits, by Hopper's fast
accumulation.

If the weight has one scale for an output, the product is an XLA dot of 8-bit operands. On a GPU that is a Triton or a
cuBLASLt kernel of 8-bit tensor cores, on a TPU one fusion that writes the scaled result. If it has groups, the product
is a kernel for Hopper (`rounded_groups`), because XLA's dot writes the sums of every group: 3.5 GiB for 2,048 rows of
14,336 outputs at K = 4,096. Other GPUs do not quantize activations for such weights.

A TPU quantizes activations only for int8 with one scale for an output, by XLA's estimates for that product: 1.18
million cycles on a v5e and 0.54 on a v6e, where a dequantized weight takes 1.90 and 0.81. E4M3 would take 2.13 and
0.67: these chips multiply it as bfloat16. Groups would take 9.5 and 7.1 or more, where a dequantized weight takes 3.26
and 2.16.

Few rows are quantized in the same way, so that a token's values do not depend on the size of its step, but `few_bits`
multiplies them in bfloat16, which has every 8-bit value. If a row has one scale, it multiplies the sums as for many
rows. Groups are given to `few_bits` as value * scale, which rounds once more. Reading the weight is the lower bound of
both forms there, 0.21 ps a weight on an H200 and 1.2 on a v5e. Arithmetic in bfloat16 exceeds this bound from 103 rows
on an H200, 120 on a v5e and 280 on a v6e; in 8 bits it takes half as long.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.ops.linear.tpu_layout import multiply_as_kept
from jaxserve.ops.quantized import GROUP_NUMBERS, TILE_OUTPUTS, Quantized, Rounded, sum_dtype

FEW_ROWS = 128  # rows of x up to which 8-bit products are not faster
_MAX_DEPTH = 2**17  # largest K: the sum of so many products of int8 fits in int32
_LEAST = 1e-30  # smallest maximum, so that the reciprocal of a scale is finite
_LIMITS = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
_CONTRACT_LAST = (((1,), (1,)), ((), ()))

Device = Literal["gpu", "hopper", "tpu"]  # gpu: NVIDIA's of compute capability 8.9 or more, but 9.0


def rounds_form(dtype: DTypeLike, group: int, depth: int, device: Device, *, zeros: bool) -> bool:
    """Return whether activations are quantized for weights of this form on a device.

    dtype: of the values. group: values that share a scale. depth: K. zeros: whether the weight has zeros
    """
    dtype = jnp.dtype(dtype)
    if dtype not in _LIMITS or zeros or depth > _MAX_DEPTH or (device == "tpu" and dtype != jnp.int8):
        return False
    return group == depth or (device == "hopper" and group % GROUP_NUMBERS == 0)


def takes(w: Quantized, device: Device) -> bool:
    """Return whether activations are quantized for w on a device."""
    if w.scales.dtype != jnp.float32:  # a scale of MXFP8 is for 32 weights, which may be a row
        return False
    return rounds_form(w.values.dtype, w.group, w.shape[-1], device, zeros=w.zeros is not None)


def rounded(x: jax.Array, w: Quantized) -> Rounded:
    """Quantize x [T, K] to the dtype of w's values, with as many scales for a row as w has."""
    rows, depth = x.shape
    grouped = x.astype(jnp.float32).reshape(rows, w.scales.shape[-1], -1)
    dtype = jnp.dtype(w.values.dtype)
    largest, limit = jnp.maximum(jnp.max(jnp.abs(grouped), axis=2), _LEAST), _LIMITS[dtype]
    steps = grouped * (limit / largest)[..., None]
    values = jnp.rint(steps) if dtype == jnp.int8 else steps
    return Rounded(values.astype(dtype).reshape(rows, depth), largest / limit)


def multiply(x: Rounded, w: Quantized, out_dtype: DTypeLike, *, interpret: bool = False) -> jax.Array:
    """Multiply rows by w [N, K] transposed -> [T, N] in `out_dtype`. interpret: run slowly, on any device

    Rows with groups are dequantized first if N is not a multiple of TILE_OUTPUTS, which can be in a part of a weight.
    """
    if w.scales.shape[1] == 1:
        return _by_row(x, w, out_dtype)
    if len(w.values) % TILE_OUTPUTS:
        wide, weight = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return lax.dot_general(wide, weight, _CONTRACT_LAST, preferred_element_type=out_dtype)
    kernel = importlib.import_module("jaxserve.ops.linear.rounded_groups")
    return kernel.matmul(x, w, out_dtype, interpret=interpret)


def matmul(x: jax.Array, w: Quantized, out_dtype: DTypeLike, *, interpret: bool = False) -> jax.Array:
    """Quantize x [T, K] and multiply it by w [*out, K] transposed -> [T, *out] in `out_dtype`. See `multiply`."""
    y = multiply(rounded(x, w), w.matrix(), out_dtype, interpret=interpret)
    return y.reshape(x.shape[0], *w.shape[:-1])


def matmul_on_tpu(x: jax.Array, w: Quantized, out_dtype: DTypeLike) -> jax.Array:
    """Do `matmul` of x [T, K] with the weight in the order in which a TPU keeps it."""
    return multiply_as_kept(functools.partial(multiply, rounded(x, w), out_dtype=out_dtype), w)


def multiply_wide(
    product: Callable[..., jax.Array], dtype: DTypeLike, x: Rounded, w: Quantized, out_dtype: DTypeLike
) -> jax.Array:
    """Multiply rows by w [*out, K] transposed -> [T, *out] in `out_dtype`, where rows and outputs have one scale each.

    product: multiplies values of x in `dtype` [T, K], a float type that has them all, by w -> [T, *out] in a given one.
    """
    unscaled = dataclasses.replace(w, scales=jnp.ones_like(w.scales))
    sums = product(x.values.astype(dtype), unscaled, jnp.float32)
    by_row = x.scales.reshape(-1, *(1,) * (sums.ndim - 1))
    return (sums * by_row * w.scales[None, ..., 0]).astype(out_dtype)


def _by_row(x: Rounded, w: Quantized, out_dtype: DTypeLike) -> jax.Array:
    """Multiply where rows and outputs have one scale each."""
    sums = lax.dot_general(x.values, w.values, _CONTRACT_LAST, preferred_element_type=sum_dtype(w.values.dtype))
    return (sums.astype(jnp.float32) * x.scales * w.scales.T).astype(out_dtype)
