"""Products: every form against numpy, and the form that each platform gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.linear import WEIGHT_FIRST_ROWS, Products

RNG = np.random.default_rng(0)


def _arrays(rows: int, *out: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    x, w, b = (RNG.standard_normal(shape, np.float32) for shape in ((rows, 48), (*out, 48), out))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(b, dtype)


@pytest.mark.parametrize("rows", [1, 2, 7, WEIGHT_FIRST_ROWS, WEIGHT_FIRST_ROWS + 1])
@pytest.mark.parametrize("out", [(40,), (3, 5, 8)], ids=["flat", "grouped"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_matches_numpy(rows: int, out: tuple[int, ...], deterministic: bool) -> None:
    x, w, bias = _arrays(rows, *out)
    expected = np.einsum("tk,...k->t...", x, w) + np.asarray(bias)
    got = jax.jit(Products(deterministic=deterministic))(x, w, bias)
    assert got.shape == (rows, *out)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 100])
def test_dtypes(rows: int) -> None:
    x, w, bias = _arrays(rows, 16, dtype="bfloat16")
    assert Products()(x, w, bias).dtype == jnp.bfloat16
    wide = Products()(x, w, bias, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    expected = np.asarray(x, np.float32) @ np.asarray(w, np.float32).T + np.asarray(bias, np.float32)
    np.testing.assert_allclose(wide, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, WEIGHT_FIRST_ROWS, WEIGHT_FIRST_ROWS + 1])
def test_a_weight_of_another_dtype_is_converted_first(rows: int, deterministic: bool) -> None:
    x, w, bias = _arrays(rows, 3, 8)
    narrow, small = w.astype(jnp.bfloat16), bias.astype(jnp.bfloat16)
    multiply = jax.jit(Products(deterministic=deterministic))
    want = multiply(x, narrow.astype(jnp.float32), small.astype(jnp.float32))
    np.testing.assert_array_equal(multiply(x, narrow, small), want)


def _lowered(rows: int, platform: str, deterministic: bool = False) -> str:
    x, w, _ = _arrays(rows, 40)
    traced = jax.jit(Products(deterministic=deterministic)).trace(x, w)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_form_follows_platform_and_rows(platform: str) -> None:
    """Weight-first on CPU up to the limit; elsewhere, and when deterministic, x @ W.T. Never both in one program."""
    for rows in (1, WEIGHT_FIRST_ROWS, WEIGHT_FIRST_ROWS + 1):
        text = _lowered(rows, platform)
        assert text.count("dot_general") == 1
        assert ("optimization_barrier" in text) == (platform == "cpu" and rows <= WEIGHT_FIRST_ROWS)
        assert "optimization_barrier" not in _lowered(rows, platform, deterministic=True)


def test_deterministic_form_never_has_one_row() -> None:
    assert "tensor<2x48xf32>" in _lowered(1, "cpu", deterministic=True)
