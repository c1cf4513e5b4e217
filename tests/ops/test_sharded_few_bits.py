"""Products with weights of few bits over several devices: on four simulated ones, against one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.ops.linear import Products, few_bits, few_bits_tpu, rounded, sharded_few_bits
from jaxserve.ops.quantized import Quantized
from tests.ops.test_quantized import RNG, quantized
from tests.quick import QUICK_FLAGS

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
DEVICES = 4


def test_over_devices() -> None:
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} {QUICK_FLAGS}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.ops.test_sharded_few_bits"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def split_over(mesh: Mesh, w: Quantized, rows: P) -> Quantized:
    """Place a weight as models do: what a row shares is on all devices of its columns."""

    def placed(leaf: jax.Array) -> jax.Array:
        spec = rows if leaf.shape[1] > 1 else P(rows[0], None)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(placed, w)


def check(mesh: Mesh, kind: str, rows: P, *, product: sharded_few_bits.Product = few_bits.matmul, **form: Any) -> None:
    """Compare the product with that of one device. rows: how the weight [N, K] is split."""
    w = quantized(kind, 128, 512, **form)
    x = jnp.asarray(RNG.standard_normal((3, 512), np.float32)).astype(jnp.bfloat16)
    product = partial(product, interpret=True)
    want = product(x, w, jnp.float32)
    split = split_over(mesh, w, rows)
    whole = jax.device_put(x, NamedSharding(mesh, P()))

    @jax.jit
    def multiply(x: jax.Array, w: Quantized) -> jax.Array:
        return sharded_few_bits.matmul(product, x, w, jnp.float32)

    got = multiply(whole, split)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    text = str(jax.jit(multiply).lower(whole, split).compile().as_text())
    values = f"{'u8' if w.packed else '[sf]8[e4m3fn]*'}\\[(\\d+),(\\d+)\\]"
    sizes = {tuple(map(int, found)) for found in re.findall(values, text)}
    assert w.values.shape not in sizes, sizes  # no device holds all of it
    assert ("all-reduce" in text) == (rows[0] is None)


def check_rounded(mesh: Mesh, kind: str, rows: P, count: int = rounded.FEW_ROWS + 2) -> None:
    """Compare a product of rounded rows, one scale each, with that of one device. rows: how the weight is split.

    The largest number of a row of x is on one device of K, and the others round by it too.
    """
    w = quantized(kind, 128, 512, group=512)
    x = jnp.asarray(RNG.standard_normal((count, 512), np.float32)).at[:, 3].mul(20).astype(jnp.bfloat16)
    want = rounded.matmul(x, w, jnp.float32)
    multiply = jax.jit(partial(Products(rounded="gpu", sharded=True), out_dtype=jnp.float32))
    placed = jax.device_put(x, NamedSharding(mesh, P(None, rows[1])))
    compiled = multiply.lower(placed, split_over(mesh, w, rows)).compile()
    got = compiled(placed, split_over(mesh, w, rows))
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
    sums = re.findall(rf"= f32\[{count},128\]\S* all-reduce\(", str(compiled.as_text()))
    assert len(sums) == (rows[0] is None)


def main() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2, 2), ("data", "tensor", "expert"))
    both = ("tensor", "expert")
    check(mesh, "int4", P(both, None), zeros=True)
    check(mesh, "int4", P(None, both))
    check(mesh, "int8", P(None, both))
    check(mesh, "int4", P(both, None), zeros=True, product=few_bits_tpu.matmul)
    check(mesh, "int8", P(None, both), product=few_bits_tpu.matmul, group=512)
    check(mesh, "fp8", P(None, both), group=512)
    for kind in ("int8", "fp8"):
        check_rounded(mesh, kind, P(None, both))
        check_rounded(mesh, kind, P(None, both), count=5)
    for count in (5, rounded.FEW_ROWS, rounded.FEW_ROWS + 2):
        check_rounded(mesh, "int8", P(both, None), count)


if __name__ == "__main__":
    main()
