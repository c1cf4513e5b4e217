"""Quantized weights: the one form in memory for all quantization formats, and how it is dequantized.

A weight is (value - zero) * scale, computed in float32. Along a row each group of values shares a scale and a zero.
Floating-point formats have no zeros:

    format   values   scales                   weights of a scale
    fp8      E4M3     float32                  a multiple of 32, or a row
    mxfp8    E4M3     exponents                32
    mxfp4    E2M1     exponents                32
    nvfp4    E2M1     E4M3 * a tensor's scale  16

Rounded is the same for 8-bit activations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

GROUP_NUMBERS = 128  # a group of quantized activations is a multiple: a shorter sum costs more to scale than to compute
TILE_OUTPUTS = 128  # outputs of a weight in groups are a multiple

BLOCK = 32  # a group is a multiple of it, or has 16 values of int8 or NVFP4
MIDDLE = 8  # the zero of 4-bit values without zeros


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A weight [..., N, K].

    values: int8 or float8_e4m3fn [..., N, K]; or uint8 [..., N, K / 2] with two 4-bit values in a byte. The low halves
      of the bytes of `block` values are its first half: of 16 bytes the first 16 of 32, of NVFP4 of 8 the first 8.
    scales: float32 [..., N, K / group]; of MXFP4 and MXFP8 uint8: the code e is the scale 2^(e - 127),
      and e is never 255 (NaN); of NVFP4 float8_e4m3fn.
    zeros: float32 [..., N, K / group]; None: the zero is MIDDLE for 4-bit integers, else 0.
    order: int32 [K], the input that each column multiplies (act-order); None: columns are in order. Experts have none.
    tensor_scale: of NVFP4, float32 with 1 in place of dimensions whose weights all share it, the last one included.
      It multiplies sums (`unscaled`), so no kernel knows of it, and the values times their scales are exact in 16 bits.
    """

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None
    order: jax.Array | None = None
    tensor_scale: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the unquantized weight."""
        *rows, last = self.values.shape
        return (*rows, last * 2 if self.packed else last)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def group(self) -> int:
        """Return the number of values in a row that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def block(self) -> int:
        """Return the number of 4-bit values that are packed together."""
        return min(BLOCK, self.group)

    @property
    def packed(self) -> bool:
        """Return whether the values have 4 bits."""
        return self.values.dtype == jnp.uint8

    @property
    def is_e2m1(self) -> bool:
        """Return whether the 4-bit values are E2M1 and not integers."""
        return self.packed and self.scales.dtype != jnp.float32

    def matrix(self) -> Quantized:
        """Return the weight with all dimensions except the last as one: values [N, K]. It has no `order`."""
        assert self.order is None and self.tensor_scale is None
        return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), self)

    def meet(self, x: jax.Array) -> tuple[jax.Array, Quantized]:
        """Return x [T, K] in the order of the columns, and the weight without `order`: the product is the same."""
        if self.order is None:
            return x, self
        return jnp.take(x, self.order, axis=1, mode="clip"), dataclasses.replace(self, order=None)

    def unscaled(self) -> Quantized:
        """Return the weight without `tensor_scale`, by which the caller multiplies its products."""
        return dataclasses.replace(self, tensor_scale=None)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Return the dequantized weight [..., N, K] in `dtype`, rounded from float32."""
        values = _unpacked(self.values, self.block) if self.packed else self.values
        values = e2m1(values) if self.is_e2m1 else values.astype(jnp.float32)
        scales = scale_numbers(self.scales)
        grouped = values.reshape(*scales.shape, -1)
        if self.zeros is not None:
            grouped = grouped - self.zeros[..., None]
        elif self.packed and not self.is_e2m1:
            grouped = grouped - MIDDLE
        wide = (grouped * scales[..., None]).reshape(self.shape)
        wide = (wide if self.tensor_scale is None else wide * self.tensor_scale).astype(dtype)
        return wide if self.order is None else jnp.take(wide, jnp.argsort(self.order), axis=-1)


def _unpacked(values: jax.Array, block: int) -> jax.Array:
    """Return 4-bit values, uint8 [..., K / 2], as uint8 [..., K]."""
    blocks = values.reshape(*values.shape[:-1], -1, 1, block // 2)
    halves = jnp.concatenate([blocks & 15, blocks >> 4], axis=-2)
    return halves.reshape(*values.shape[:-1], -1)


def e2m1(codes: jax.Array) -> jax.Array:
    """Convert E2M1 bits (a sign, two bits of exponent biased by 1, one of mantissa), uint8 [...] -> float32 [...]."""
    codes = codes.astype(jnp.int32)
    magnitude = codes & 7
    normal = lax.bitcast_convert_type((magnitude << 22) + (126 << 23), jnp.float32)  # biased by 126 more there
    number = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where(codes > 7, -number, number)


def powers(exponents: jax.Array) -> jax.Array:
    """Return 2^(e - 127) of exponents uint8 [...] -> float32 [...]. e = 0 gives the subnormal value 2^-127."""
    bits = jnp.maximum(exponents.astype(jnp.int32) << 23, 1 << 22)
    return lax.bitcast_convert_type(bits, jnp.float32)


def scale_numbers(scales: jax.Array) -> jax.Array:
    """Return stored scales [...] of any form as numbers, float32 [...]."""
    return powers(scales) if scales.dtype == jnp.uint8 else scales.astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """Activations quantized to 8 bits: int8 or float8_e4m3fn [T, K], scales float32 [T, 1] or [T, groups of K]."""

    values: jax.Array
    scales: jax.Array

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Return the dequantized rows [T, K] in `dtype`, rounded from float32."""
        grouped = self.values.astype(jnp.float32).reshape(*self.scales.shape, -1)
        return (grouped * self.scales[..., None]).reshape(self.values.shape).astype(dtype)


def sum_dtype(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype in which products of values of this dtype are summed."""
    return jnp.int32 if dtype == jnp.int8 else jnp.float32
