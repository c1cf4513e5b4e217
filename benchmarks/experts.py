"""Time the experts of one layer on a CPU: the C kernel beside XLA's loop over tiles, by turns.

    python -m benchmarks.experts [--experts 32] [--ffn 768] [--model 2048] [--choices 8] [--rows 1 8 64]

The default is a layer of Qwen3-30B-A3B with a quarter of its experts. Prints the fastest of some runs in milliseconds,
and the floor: the bytes of the experts that the rows chose, at the bandwidth that floors.py measures.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.floors import measure_machine
from jaxserve.models.checkpoint.quantization import encode
from jaxserve.ops import native
from jaxserve.ops.linear import Products
from jaxserve.ops.moe import Chosen, ExpertWeights, moe
from jaxserve.ops.quantized import Quantized

FORMS = ("float32", "bfloat16", "int8", "int4", "mxfp4")
REPEATS = 7


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gate, up [M, F] -> [M, F]."""
    return jax.nn.silu(gate) * up


def in_form(w: np.ndarray, form: str) -> jax.Array | Quantized:
    """Return float32 weights [..., K] in one of FORMS."""
    if form in ("float32", "bfloat16"):
        return jnp.asarray(w, form)
    values, scales = encode(w, form.replace("mxfp4", "int4"), 32)
    if form == "mxfp4":  # the codes of other numbers, but as many
        scales = np.full(scales.shape, 120, np.uint8)
    return Quantized(jnp.asarray(values), jnp.asarray(scales))


def milliseconds(x: jax.Array, ids: jax.Array, experts: ExpertWeights, *, kernel: bool) -> float:
    """Time one layer: x float32 [T, D], ids int32 [T, K]."""
    product = Products(native=kernel).of_experts(x.dtype, experts.gate_up, experts.down)
    weights = jnp.full(ids.shape, 1 / ids.shape[1], jnp.float32)
    layer = jax.jit(lambda x, experts: moe(x, Chosen(ids, weights), experts, swiglu, product))
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        layer(x, experts).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds) * 1e3


def main() -> None:
    """Measure every form at every number of rows and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 32), ("ffn", 768), ("model", 2048), ("choices", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    native.load()
    rng, bandwidth = np.random.default_rng(0), measure_machine().bandwidth
    count, ffn, model = options.experts, options.ffn, options.model
    gate_up, down = (rng.standard_normal(shape, np.float32) for shape in ((count, ffn, 2, model), (count, model, ffn)))
    for form in FORMS:
        experts = ExpertWeights(in_form(gate_up, form), in_form(down, form))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(experts)) / count
        for rows in options.rows:
            ids = np.stack([rng.permutation(count)[: options.choices] for _ in range(rows)])
            x = jnp.asarray(rng.standard_normal((rows, model), np.float32))
            times = [milliseconds(x, jnp.asarray(ids, jnp.int32), experts, kernel=kernel) for kernel in (False, True)]
            floor = len(np.unique(ids)) * size / bandwidth * 1e3
            print(f"{form:9} {rows:3} rows: XLA {times[0]:8.2f}, C {times[1]:7.2f} ms, floor {floor:.2f}", flush=True)


if __name__ == "__main__":
    main()
