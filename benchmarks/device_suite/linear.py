"""The linear layers of the device suite: quantized weights beside float32, and the products of Llama-3.1-8B by rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_suite.kernels import DTYPE, TOLERANCE, clock, normal, rates
from benchmarks.device_suite.rows import Bench, Row
from jaxserve.ops.linear import Products, few_bits, few_bits_tpu
from jaxserve.ops.quantized import Quantized


def numerics(bench: Bench) -> None:
    """Compare the kernel of quantized weights with the same numbers in float32, for few rows and many."""
    for form in ("int8", "int4", "fp8", "mxfp4"):
        for rows in (3,) if bench.tiny else (1, 100):
            cell, question = functools.partial(_compare, bench, form, rows), f"Are products of {form} weights right?"
            bench.cell(f"linear {form} {rows} rows", 3, cell, answers=question, optional=rows == 1)


def _compare(bench: Bench, form: str, rows: int) -> Row:
    out, width = (96, 64) if bench.tiny else (4096, 4096)
    x, w = normal(1, rows, width), _weight(form, out, width)
    kernel = few_bits_tpu if bench.platform == "tpu" else few_bits
    product = jax.jit(functools.partial(kernel.matmul, out_dtype=DTYPE, interpret=bench.platform == "cpu"))
    got = np.asarray(product(x, w).astype(jnp.float32))
    want = np.asarray(x.astype(jnp.float32)) @ np.asarray(w.astype(jnp.float32)).T
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return {"rel_err": error, "ok": bool(error < TOLERANCE)}


def _weight(form: str, out: int, width: int) -> Quantized:
    """Return random values [out, width] with a scale for each row, or for 32 numbers of 4 bits."""
    bits = jax.random.bits(jax.random.key(2), (out, width // 2 if form in ("int4", "mxfp4") else width), jnp.uint8)
    if form == "mxfp4":
        return Quantized(bits, jnp.full((out, width // 32), 120, jnp.uint8))
    if form == "int4":
        return Quantized(bits, jnp.full((out, width // 32), 0.01, jnp.float32))
    values = bits.astype(jnp.int8) if form == "int8" else normal(3, out, width).astype(jnp.float8_e4m3fn)
    return Quantized(values, jnp.full((out, 1), 0.01, jnp.float32))


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
