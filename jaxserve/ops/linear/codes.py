"""Dequantize 8-bit and 4-bit values to float32 inside the kernels for GPUs and TPUs.

A byte has two 4-bit values: the low halves of a block's bytes are the first half of its values. A kernel therefore gets
x in two halves, for the low and for the high halves of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxserve.ops.quantized import MIDDLE, e2m1


def halves(x: jax.Array, block: int) -> jax.Array:
    """Return the columns of x for the low and for the high halves of bytes: x [T, K] -> [2, T, K / 2].

    block: of the weight, see `Quantized.block`
    """
    rows, depth = x.shape
    return x.reshape(rows, depth // block, 2, block // 2).transpose(2, 0, 1, 3).reshape(2, rows, depth // 2)


def wide(values: jax.Array, scale: jax.Array, zero: jax.Array | None, *, is_e2m1: bool) -> Iterator[jax.Array]:
    """Yield the dequantized parts of a tile as float32 [N, C]: one for 8-bit values, two for pairs of 4-bit values.

    values: [N, C] as `Quantized.values`. scale, zero: float32 [N, C], of each value's group
    """
    for numbers in _numbers(values, is_e2m1):
        if zero is not None:
            yield (numbers - zero) * scale
        elif values.dtype == jnp.uint8 and not is_e2m1:
            yield (numbers - MIDDLE) * scale
        else:
            yield numbers * scale


def _numbers(values: jax.Array, is_e2m1: bool) -> Iterator[jax.Array]:
    """Yield the values of each half as float32."""
    if values.dtype != jnp.uint8:
        yield values.astype(jnp.float32)
        return
    pairs = values.astype(jnp.int32)
    for codes in (pairs & 15, pairs >> 4):
        yield e2m1(codes) if is_e2m1 else codes.astype(jnp.float32)
