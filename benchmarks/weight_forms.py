"""Measure the CPU's linear kernels with weights in each form, by turns, against float32.

    python -m benchmarks.weight_forms --rows 1 8 32 128

Each form multiplies the same rows by the same numbers. The weights of a form are larger than the caches. The result has
the median of each form's milliseconds and its ratio to float32 over the same turns. Q6_K and Q4_K are held as int8 with
a scale for 16 numbers, and as 4 bits with a scale and a zero for 32. "int8 rounded" is int8 with rows
that are rounded too (`runtime.activations: rounded`), on processors that have the instructions.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.checkpoint.quantization import encode
from jaxserve.ops import native
from jaxserve.ops.linear import Products, Weight
from jaxserve.ops.quantized import MIDDLE, Quantized

SHAPE, COUNT = (8192, 2048), 4  # 268 MB in float32


def weights(form: str) -> list[jax.Array] | list[Quantized]:
    """Return random weights [N, K] in a form."""
    wide = (jax.random.normal(jax.random.key(i), SHAPE, jnp.float32) for i in range(COUNT))
    if form in ("float32", "bfloat16"):
        return [w.astype(form) for w in wide]
    kind, group, zeros = HELD[form]
    encoded = (encode(np.asarray(w), kind, group) for w in wide)
    leaves = ((jnp.asarray(values), jnp.asarray(scales)) for values, scales in encoded)
    return [Quantized(values, scales, jnp.full_like(scales, MIDDLE) if zeros else None) for values, scales in leaves]


FORMS = ("float32", "bfloat16", "int8", "fp8", "int4", "nvfp4", "mxfp4", "Q6_K", "Q4_K")
HELD = {  # kind, group, and whether there are zeros
    "int8": ("int8", 128, False),
    "fp8": ("fp8", 128, False),
    "int4": ("int4", 32, False),
    "nvfp4": ("nvfp4", 16, False),
    "mxfp4": ("mxfp4", 32, False),
    "Q6_K": ("int8", 16, False),
    "Q4_K": ("int4", 32, True),
}


def milliseconds(rows: int, turns: int, forms: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the time of all products with x [rows, K], for each form [turns]."""
    x = jax.random.normal(jax.random.key(0), (rows, SHAPE[1]), jnp.float32)

    @functools.partial(jax.jit, static_argnames="rounded")
    def multiply(x: jax.Array, ws: list[Weight], *, rounded: bool) -> list[jax.Array]:
        """x [rows, K], ws [N, K] each -> [rows, N] each"""
        product = Products(native=True, rounded="cpu" if rounded else None)
        return [product(x, w) for w in ws]

    held = {form: weights(form) for form in forms}
    cases = {form: (form, False) for form in forms}
    cases |= {f"{form} rounded": (form, True) for form in forms if native.rounds(held[form][0])}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(turns + 1):
        for name, (form, rounded) in cases.items():
            began = time.perf_counter()
            jax.block_until_ready(multiply(x, held[form], rounded=rounded))
            if turn:  # the first compiles
                times[name].append((time.perf_counter() - began) * 1e3)
    return {name: np.array(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="the ratios are to the first")
    options = parser.parse_args()
    native.load()
    print(f"{COUNT} weights of {SHAPE}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    for rows in options.rows:
        times = milliseconds(rows, options.turns, options.forms)
        for form, found in times.items():
            ratio = np.median(times[options.forms[0]] / found)
            print(f"{rows:4d} rows  {form:16s} {np.median(found):8.2f} ms  best {found.min():8.2f}  x {ratio:.2f}")


if __name__ == "__main__":
    main()
