"""The Triton kernel for weights of 8 and 4 bits: interpreted against numpy, and lowered for an H200."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxserve.ops.linear import Products, few_bits, few_bits_tpu
from jaxserve.ops.quantized import Quantized
from tests.ops.test_quantized import KINDS, RNG, decoded, quantized

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

# rows of x, outputs, depth, group: no multiples of a tile; groups of 32, 64, 128, 96 and a whole row; K split in two.
SHAPES = (
    (1, 40, 96, 32),
    (3, 33, 320, 64),
    (17, 65, 384, 128),
    (64, 24, 192, 96),
    (70, 5, 448, 448),
    (2, 8, 2048, 128),
)


def expected(x: jax.Array, w: Quantized) -> np.ndarray:
    """The products of numbers that are rounded to x's dtype, summed in float64."""
    wide = jnp.asarray(decoded(w)).astype(x.dtype)
    return np.asarray(x, np.float64) @ np.asarray(wide, np.float64).T


FORMS = [(kind, zeros) for kind in KINDS for zeros in (False, True) if not (zeros and "fp" in kind)]
# Every form with one shape and every shape once; the rest is slow.
CASES = [
    pytest.param(*form, *shape, marks=() if i == j or (i, j) == (0, 5) else pytest.mark.slow)
    for i, form in enumerate(FORMS)
    for j, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("kind", "zeros", "rows", "outputs", "depth", "group"), CASES)
def test_products(kind: str, zeros: bool, rows: int, outputs: int, depth: int, group: int) -> None:
    w = quantized(kind, outputs, depth, group=group, zeros=zeros)
    x = jnp.asarray(RNG.standard_normal((rows, depth), np.float32)).astype(jnp.bfloat16)
    want = expected(x, w)
    got = few_bits.matmul(x, w, jnp.float32, interpret=True)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def test_groups_of_16() -> None:
    w = quantized("int8", 33, 384, group=16, zeros=True)
    x = jnp.asarray(RNG.standard_normal((3, 384), np.float32)).astype(jnp.bfloat16)
    want = expected(x, w)
    for kernel in (few_bits, few_bits_tpu):
        got = kernel.matmul(x, w, jnp.float32, interpret=True)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def test_a_result_in_16_bits() -> None:
    w = quantized("int4", 16, 64)
    x = jnp.asarray(RNG.standard_normal((4, 64), np.float32)).astype(jnp.bfloat16)
    got = few_bits.matmul(x, w, jnp.bfloat16, interpret=True)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, few_bits.matmul(x, w, jnp.float32, interpret=True).astype(jnp.bfloat16))


def test_splits_are_few_and_long() -> None:
    assert few_bits._splits(programs=40, steps=32) == 4
    assert few_bits._splits(programs=40, steps=7) == 1
    assert few_bits._splits(programs=200, steps=100) == 1


def lowered(rows: int, w: Any, **options: Any) -> str:
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    x = jax.ShapeDtypeStruct((rows, w.shape[-1]), options.pop("dtype", jnp.bfloat16))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(Products(few_bits="gpu", **options)).trace(x, w)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_layer_is_the_kernel_for_few_rows_of_16_bits(kind: str) -> None:
    small = quantized(kind, 8, 256)
    w = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((4096, 16 * leaf.shape[1]), leaf.dtype), small)
    for rows in (1, 128, few_bits.MAX_ROWS):
        assert "linear_few_bits" in lowered(rows, w)
    assert "linear_few_bits" not in lowered(few_bits.MAX_ROWS + 1, w)
    assert "linear_few_bits" not in lowered(1, w, deterministic=True)
    assert "linear_few_bits" not in lowered(1, w, dtype=jnp.float32)  # type: ignore[arg-type]
    assert "linear_few_bits" not in lowered(1, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
