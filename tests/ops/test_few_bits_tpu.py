"""The TPU kernel for weights of 8 and 4 bits: interpreted against numpy, and lowered for a v5e."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxserve.ops.linear import Products, few_bits_tpu
from tests.ops.test_few_bits import FORMS, expected
from tests.ops.test_quantized import KINDS, RNG, quantized

# rows of x, outputs, depth, group: several tiles of outputs; several of K, with groups that do not divide one; more
# groups than are read at a time; rows of 96 bytes, which are widened by XLA
SHAPES = ((1, 520, 256, 32), (17, 40, 768, 96), (130, 5, 512, 128), (3, 2, 8448, 32), (2, 8, 192, 64))
CASES = [
    pytest.param(*form, *shape, marks=() if i % len(SHAPES) == j or shape == SHAPES[1] else pytest.mark.slow)
    for i, form in enumerate(FORMS)
    for j, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("kind", "zeros", "rows", "outputs", "depth", "group"), CASES)
def test_products(kind: str, zeros: bool, rows: int, outputs: int, depth: int, group: int) -> None:
    w = quantized(kind, outputs, depth, group=group, zeros=zeros)
    x = jnp.asarray(RNG.standard_normal((rows, depth), np.float32)).astype(jnp.bfloat16)
    want = expected(x, w)
    got = few_bits_tpu.matmul(x, w, jnp.float32, interpret=True)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def test_a_result_in_16_bits() -> None:
    w = quantized("int8", 16, 128)
    x = jnp.asarray(RNG.standard_normal((4, 128), np.float32)).astype(jnp.bfloat16)
    got = few_bits_tpu.matmul(x, w, jnp.bfloat16, interpret=True)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, few_bits_tpu.matmul(x, w, jnp.float32, interpret=True).astype(jnp.bfloat16))


def test_the_axis_before_the_last_is_short() -> None:
    w = quantized("int4", 48, 2, 256, zeros=True)
    x = jnp.asarray(RNG.standard_normal((3, 256), np.float32)).astype(jnp.bfloat16)
    got = few_bits_tpu.matmul(x, w, jnp.float32, interpret=True)
    np.testing.assert_array_equal(got.reshape(3, 96), few_bits_tpu.matmul(x, w.matrix(), jnp.float32, interpret=True))


def lowered(rows: int, w: Any, dtype: Any = jnp.bfloat16, **options: Any) -> str:
    x = jax.ShapeDtypeStruct((rows, w.shape[-1]), dtype)
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(Products(few_bits="tpu", **options)).trace(x, w)
        return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_layer_is_the_kernel(kind: str) -> None:
    small = quantized(kind, 8, 256)
    w = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((4096, 16 * leaf.shape[1]), leaf.dtype), small)
    for rows in (1, 128, few_bits_tpu.MAX_TPU_ROWS):
        assert lowered(rows, w).count("tpu_custom_call") == 1
    assert "tpu_custom_call" not in lowered(few_bits_tpu.MAX_TPU_ROWS + 1, w)
    assert "tpu_custom_call" not in lowered(1, w, deterministic=True)
    assert "tpu_custom_call" not in lowered(1, w, jnp.float32)
    assert "tpu_custom_call" not in lowered(1, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
