"""The linear layers of the device suite: the products of Llama-3.1-8B by rows, and few rows without a product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxserve.bench.device_kernels import clock, normal, rates
from jaxserve.bench.device_rows import Bench, Row
from jaxserve.ops.linear import Products


def linear_layers(bench: Bench) -> None:
    """Time the products of Llama-3.1-8B. Several weights take turns, so that no cache holds them."""
    shapes = {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    }
    counts: Sequence[int] = (1, 2, 8, 32, 100, 256, 512)
    if bench.tiny:
        shapes, counts = {"qkv": (96, 64)}, (1, 4)
    for name, shape in shapes.items():
        for rows in counts:
            bench.cell(f"{name} {rows} rows", 6, functools.partial(_time_linear, bench, shape, rows, Products()))
            if rows <= 2:
                measure = functools.partial(_time_linear, bench, shape, rows, _multiply_and_sum)
                bench.cell(f"{name} {rows} rows, multiplied and summed", 6, measure)


def _multiply_and_sum(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply x [T, in] by w [out, in] transposed without a matrix product, which few rows do not fill: [T, out]."""
    return jnp.sum(x.astype(jnp.float32)[:, None] * w.astype(jnp.float32)[None], axis=-1).astype(x.dtype)


def _time_linear(bench: Bench, shape: tuple[int, int], rows: int, product: Callable[..., jax.Array]) -> Row:
    out, width = shape
    weights = [normal(i, out, width) for i in range(2 if out > 100_000 or bench.tiny else 4)]
    x = normal(9, rows, width)
    forward = jax.jit(lambda x, weights: [product(x, w) for w in weights])
    seconds = clock(forward, x, weights, tiny=bench.tiny, chained=10) / len(weights)
    return rates(bench, seconds, 2 * out * width, 2 * rows * out * width)


SECTIONS: dict[str, Callable[[Bench], None]] = {"linear": linear_layers}
