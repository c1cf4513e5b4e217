"""Rotation against its definition, and each scaling against figures worked out apart from the code."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    apply_rope,
    inverse_frequencies,
    rope_table,
)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved: bool) -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, 6)).astype(np.float32)
    positions = np.array([0, 5, 1000])
    table = rope_table(RopeConfig(4), jnp.asarray(positions, jnp.int32))
    out = np.asarray(apply_rope(jnp.asarray(x), table, interleaved))
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    for pair, frequency in zip(pairs, (1.0, 0.01), strict=True):
        before = x[..., pair[0]] + 1j * x[..., pair[1]]
        after = before * np.exp(1j * positions * frequency)[:, None]
        assert np.allclose(out[..., pair[0]] + 1j * out[..., pair[1]], after, atol=1e-4)
    assert np.array_equal(out[..., 4:], x[..., 4:])  # beyond rotary_dim nothing is rotated


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, _ = inverse_frequencies(RopeConfig(128, theta=500000.0))
    scaled, factor = inverse_frequencies(RopeConfig(128, 500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)))
    wavelength = 2 * np.pi / plain
    assert factor == 1.0
    assert np.array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    assert np.allclose(scaled[wavelength > 8192] * 8, plain[wavelength > 8192])
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any() and (scaled[between] < plain[between]).all()
    # dimension 32 by hand: wavelength 4442.88; smooth = (8192 / 4442.88 - 1) / 3 = 0.281283
    assert scaled[32] == pytest.approx(plain[32] * (0.281283 + (1 - 0.281283) / 8), rel=1e-5)


def test_linear_divides_all() -> None:
    plain, _ = inverse_frequencies(RopeConfig(8))
    assert np.allclose(inverse_frequencies(RopeConfig(8, scaling=LinearScaling(4.0)))[0] * 4, plain)


def test_yarn_keeps_the_fast_and_interpolates_the_slow() -> None:
    plain, _ = inverse_frequencies(RopeConfig(64, 150000.0))
    scaled, factor = inverse_frequencies(RopeConfig(64, 150000.0, YarnScaling(32.0, 4096, attention_factor=1.34657)))
    assert factor == 1.34657
    assert scaled[0] == plain[0] and scaled[-1] == pytest.approx(plain[-1] / 32)


@pytest.mark.parametrize("long", [False, True])
def test_longrope_takes_the_factors_of_the_served_context(long: bool) -> None:
    plain, _ = inverse_frequencies(RopeConfig(4))
    scaling = LongRopeScaling((1.0, 2.0), (3.0, 5.0), 4096, 1.19, long)
    scaled, factor = inverse_frequencies(RopeConfig(4, scaling=scaling))
    assert factor == 1.19
    assert np.allclose(scaled, plain / (np.array([3.0, 5.0]) if long else np.array([1.0, 2.0])))


def test_angles_are_float32_whatever_comes_in() -> None:
    cos, sin, _ = rope_table(RopeConfig(8), jnp.asarray([257], jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    assert float(sin[0, 0]) == pytest.approx(np.sin(257.0), abs=1e-5)
