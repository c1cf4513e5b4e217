"""Quantized weights: the one form in memory for all quantization formats, and how it is dequantized.

A weight is (value - zero) * scale, computed in float32. Along a row each group of values shares a scale and a zero.
MXFP4 has E2M1 values, no zeros, and scales stored as exponents. Rounded is the same for 8-bit activations.
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

BLOCK = 32  # 4-bit values that are packed together; a group is a multiple of it, or has 16 values of int8
MIDDLE = 8  # the zero of 4-bit values without zeros


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A weight [..., N, K].

    values: int8 or float8_e4m3fn [..., N, K]; or uint8 [..., N, K / 2] with two 4-bit values in a byte, where the low
      halves of the 16 bytes of a block of 32 values are its first 16.
    scales: float32 [..., N, K / group]; of MXFP4 uint8: the code e is the scale 2^(e - 127),
      and e is never 255 (NaN).
    zeros: float32 [..., N, K / group]; None: the zero is MIDDLE for 4-bit integers, else 0. FP8 and MXFP4 have none.
    order: int32 [K], the input that each column multiplies (act-order); None: columns are in order. Experts have none.
    """

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None
    order: jax.Array | None = None

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
    def packed(self) -> bool:
        """Return whether the values have 4 bits."""
        return self.values.dtype == jnp.uint8

    @property
    def mxfp4(self) -> bool:
        """Return whether the 4-bit values are E2M1 and not integers."""
        return self.scales.dtype == jnp.uint8

    def matrix(self) -> Quantized:
        """Return the weight with all dimensions except the last as one: values [N, K]. It has no `order`."""
        assert self.order is None
        return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), self)

    def meet(self, x: jax.Array) -> tuple[jax.Array, Quantized]:
        """Return x [T, K] in the order of the columns, and the weight without `order`: the product is the same."""
        if self.order is None:
            return x, self
        return jnp.take(x, self.order, axis=1, mode="clip"), dataclasses.replace(self, order=None)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Return the dequantized weight [..., N, K] in `dtype`, rounded from float32."""
        values = _unpacked(self.values) if self.packed else self.values
        values = e2m1(values) if self.mxfp4 else values.astype(jnp.float32)
        scales = powers(self.scales) if self.mxfp4 else self.scales
        grouped = values.reshape(*scales.shape, -1)
        if self.zeros is not None:
            grouped = grouped - self.zeros[..., None]
        elif self.packed and not self.mxfp4:
            grouped = grouped - MIDDLE
        wide = (grouped * scales[..., None]).reshape(self.shape).astype(dtype)
        return wide if self.order is None else jnp.take(wide, jnp.argsort(self.order), axis=-1)


def _unpacked(values: jax.Array) -> jax.Array:
    """Return 4-bit values, uint8 [..., K / 2], as uint8 [..., K]."""
    blocks = values.reshape(*values.shape[:-1], -1, 1, BLOCK // 2)
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
