"""8-bit pages: K and V as int8 or FP8 with a scale for each token and head. A backend stores them in its own layout.

An element is value * scale, computed in float32. The scale is the row's largest magnitude over the format's largest
value, so a token's stored values depend on that token only.

An array of unsigned integers can store the bits of bfloat16 or FP8. XLA on a CPU has no gather and scatter for these
dtypes: it converts the whole array to float32 and back, 3.2 s for one row of 625 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# The largest value of each format that is used. E4M3 has no infinity, and rounds values above 464 to NaN.
LARGEST = {jnp.dtype("int8"): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
BITS = {jnp.dtype(jnp.bfloat16): jnp.dtype("uint16"), jnp.dtype(jnp.float8_e4m3fn): jnp.dtype("uint8")}
_NUMBERS = {bits: numbers for numbers, bits in BITS.items()}
SMALLEST = 2.0**-126  # a smaller scale is subnormal, which some devices treat as 0: the row becomes 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledPages:
    """A layer's pages in 8 bits.

    values: int8, float8_e4m3fn or its bits, shaped as the backend's unquantized pages.
    scales: float32, shaped as the backend's `scale_shape`.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Return the size of values and scales, in bytes."""
        return self.values.nbytes + self.scales.nbytes

    @classmethod
    def of(cls, rows: jax.Array, dtype: DTypeLike) -> ScaledPages:
        """Quantize rows [..., D] -> values [..., D] and scales [..., 1]. If a row is not finite, nor is its scale."""
        wide = rows.astype(jnp.float32)
        largest = LARGEST[numbers_dtype(dtype)]
        scales = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) * (1.0 / largest)
        values = jnp.clip(wide * (1.0 / jnp.where(scales >= SMALLEST, scales, 1.0)), -largest, largest)
        steps = 1.0 if dtype == jnp.int8 else _e4m3_steps(values)
        return cls(held(jnp.round(values / steps) * steps, dtype), scales)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Dequantize to `dtype`, rounded from float32: values [..., D * n] with scales [..., n], or [..., 1]."""
        by_scale = numbers(self.values).astype(jnp.float32).reshape(*self.scales.shape, -1)
        return (by_scale * self.scales[..., None]).reshape(self.values.shape).astype(dtype)


def _e4m3_steps(values: jax.Array) -> jax.Array:
    """Return the distance between E4M3's values around each float32 value [...]: a power of two.

    XLA may convert by way of float16, which would round twice unless the value is one of E4M3's already.
    """
    exponents = jax.lax.bitcast_convert_type(values, jnp.int32) & 0x7F800000
    return jnp.maximum(jax.lax.bitcast_convert_type(exponents, jnp.float32), 2.0**-6) / 8


Pages = jax.Array | ScaledPages


def is_scaled(dtype: DTypeLike) -> bool:
    """Return whether pages of this dtype have scales."""
    return numbers_dtype(dtype) in LARGEST


def numbers_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of the values that an array of this dtype stores."""
    return _NUMBERS.get(jnp.dtype(dtype), jnp.dtype(dtype))


def numbers(array: jax.Array) -> jax.Array:
    """Return the values that an array [...] stores; the array itself if it does not store bits."""
    dtype = numbers_dtype(array.dtype)
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def held(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round values [...] to the page's dtype and return them in the dtype of the array that stores them."""
    rounded = array.astype(numbers_dtype(dtype))
    return rounded if rounded.dtype == dtype else jax.lax.bitcast_convert_type(rounded, dtype)


def stored(rows: jax.Array, dtype: DTypeLike) -> Pages:
    """Return rows [..., D] in the form in which pages of a dtype store them, with scales [..., 1] if it has 8 bits."""
    return ScaledPages.of(rows, dtype) if is_scaled(dtype) else held(rows, dtype)
