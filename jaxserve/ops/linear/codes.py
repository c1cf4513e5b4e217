"""Dequantize 8-bit and 4-bit values to float32 inside the kernels for GPUs and TPUs.

A byte has two 4-bit values: the low halves of a block's 16 bytes are its first 16 values. A kernel therefore gets x in
two halves, for the low and for the high halves of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxserve.ops.quantized import BLOCK, MIDDLE, e2m1


def halves(x: jax.Array) -> jax.Array:
    """Return the columns of x for the low and for the high halves of bytes: x [T, K] -> [2, T, K / 2]."""
    rows, depth = x.shape
    return x.reshape(rows, depth // BLOCK, 2, BLOCK // 2).transpose(2, 0, 1, 3).reshape(2, rows, depth // 2)


def wide(values: jax.Array, scale: jax.Array, zero: jax.Array | None, *, mxfp4: bool) -> Iterator[jax.Array]:
    """Yield the dequantized parts of a tile as float32 [N, C]: one for 8-bit values, two for pairs of 4-bit values.

    values: [N, C] as `Quantized.values`. scale, zero: float32 [N, C], of each value's group. mxfp4: values are E2M1
    """
    for numbers in _numbers(values, mxfp4):
        if zero is not None:
            yield (numbers - zero) * scale
        elif values.dtype == jnp.uint8 and not mxfp4:
            yield (numbers - MIDDLE) * scale
        else:
            yield numbers * scale


def _numbers(values: jax.Array, mxfp4: bool) -> Iterator[jax.Array]:
    """Yield the values of each half as float32."""
    if values.dtype != jnp.uint8:
        yield values.astype(jnp.float32)
        return
    pairs = values.astype(jnp.int32)
    for codes in (pairs & 15, pairs >> 4):
        yield e2m1(codes) if mxfp4 else codes.astype(jnp.float32)
