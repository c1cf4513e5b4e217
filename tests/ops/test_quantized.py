"""Weights of few bits: wide numbers against an independent decoder, kernels against the wide numbers, bit by bit."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.quantization import encode, pack
from jaxserve.ops import native
from jaxserve.ops.linear import Products
from jaxserve.ops.moe import Chosen, ExpertWeights, moe
from jaxserve.ops.quantized import Quantized

RNG = np.random.default_rng(0)
KINDS = ("int8", "fp8", "int4", "mxfp8", "mxfp4", "nvfp4")
GROUPS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}  # of the forms that have one size of it
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def quantized(kind: str, *shape: int, group: int = 32, zeros: bool = False) -> Quantized:
    """Random values; with 256 numbers every one that the kind has. Floating-point forms have no zeros."""
    group = GROUPS.get(kind, group)
    scales = RNG.uniform(0.01, 2, (*shape[:-1], shape[-1] // group)).astype(np.float32)
    codes = RNG.permuted(np.resize(np.arange(256, dtype=np.uint8), shape).reshape(-1)).reshape(shape)
    finite = np.where(codes & 127 == 127, 0, codes).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    match kind:
        case "int8":
            values = codes.view(np.int8)
        case "fp8" | "mxfp8":
            values = finite
        case _:
            values = pack(codes & 15, min(32, group))
    if kind.startswith("mx"):
        scales = RNG.integers(110, 140, scales.shape, np.uint8)
    if kind == "nvfp4":  # every scale, zero and subnormal ones too
        scales = RNG.permuted(np.resize(np.arange(127, dtype=np.uint8), scales.size)).reshape(scales.shape)
        scales = scales.view(ml_dtypes.float8_e4m3fn)
    some = jnp.asarray(RNG.integers(0, 16, scales.shape).astype(np.float32))
    return Quantized(jnp.asarray(values), jnp.asarray(scales), some if zeros and "fp" not in kind else None)


def decoded(w: Quantized) -> np.ndarray:
    """Number by number, in Python."""
    values, scales = np.asarray(w.values), np.asarray(w.scales)
    if scales.dtype == np.uint8:
        scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    scales = scales.astype(np.float32)
    wide = np.empty(w.shape, np.float32)
    group = w.shape[-1] // scales.shape[-1]
    for index in np.ndindex(*w.shape):
        *row, k = index
        if w.packed:
            half = min(32, group) // 2  # bytes that are packed together
            byte = int(values[(*row, k // (2 * half) * half + k % half)])
            code = byte >> 4 if k % (2 * half) >= half else byte % 16
            value = np.float32(E2M1[code & 7] * (-1 if code > 7 else 1) if w.is_e2m1 else code)
        else:
            value = np.float32(values[index])
        zero = np.float32(8 if w.packed and not w.is_e2m1 else 0)
        if w.zeros is not None:
            zero = np.asarray(w.zeros)[(*row, k // group)]
        wide[index] = (value - zero) * scales[(*row, k // group)]
    return wide


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_wide_numbers_are_those_of_the_decoder(kind: str, zeros: bool) -> None:
    for group in (32, 64, 192, *((16,) if kind == "int8" else ())):
        w = quantized(kind, 2, 3, 192, group=group, zeros=zeros)
        assert w.shape == (2, 3, 192) and w.group == GROUPS.get(kind, group)
        np.testing.assert_array_equal(w.astype(jnp.float32), decoded(w))
        np.testing.assert_array_equal(w.matrix().astype(jnp.float32), decoded(w).reshape(6, 192))


def test_mxfp4_of_every_scale() -> None:
    """The table and 2^(e - 127) of the standard, from the smallest scale whose products are normal numbers."""
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = np.array(numbers + [-number for number in numbers], np.float32)
    codes = np.stack([RNG.permutation(np.arange(32) % 16) for _ in range(254)]).astype(np.uint8)
    exponents = np.arange(1, 255, dtype=np.uint8)[:, None]
    w = Quantized(jnp.asarray(pack(codes)), jnp.asarray(exponents))
    assert w.shape == codes.shape and w.is_e2m1
    with np.errstate(over="ignore"):
        expected = np.ldexp(table[codes], exponents.astype(np.int32) - 127)
    np.testing.assert_array_equal(w.astype(jnp.float32)[1:], expected[1:])
    assert np.signbit(np.asarray(w.astype(jnp.float32)[5])[codes[5] == 8]).all()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_have_the_bits_of_the_wide_numbers(kind: str, zeros: bool) -> None:
    """Groups of a block, of several, and of a row that is longer than the piece that is widened at a time."""
    try:
        native.load()
    except ConfigError as error:
        if "no C compiler" in str(error):
            pytest.skip(str(error))
        raise
    sizes = ((1, 32, 32), (25, 64, 32), (61, 192, 64), (30, 448, 448), (23, 512, 128))
    check_bits(kind, zeros, (*sizes, *(((25, 96, 16),) if kind == "int8" else ())), (1, 2, 8, 16, 17, 40))


def test_experts_with_groups_of_16() -> None:
    native.load()
    w = quantized("int8", 3, 8, 64, group=16, zeros=True)
    x, sizes = jnp.asarray(RNG.standard_normal((7, 64), np.float32)), jnp.array([2, 0, 5], jnp.int32)
    for few in (False, True):
        want = native.matmul_grouped(x, w.astype(jnp.float32), sizes, few=few)
        np.testing.assert_array_equal(native.matmul_grouped(x, w, sizes, few=few), want)
    assert not native.rounds(w)


def check_bits(kind: str, zeros: bool, sizes: Sequence[tuple[int, int, int]], counts: Sequence[int]) -> None:
    """sizes: rows, depth and group of the weights; counts: of tokens"""
    for rows, depth, group in sizes:
        w = quantized(kind, rows, depth, group=group, zeros=zeros)
        assert "fp" in kind or (w.zeros is not None) == zeros
        wide = w.astype(jnp.float32)
        for tokens in counts:
            x = jnp.asarray(RNG.standard_normal((tokens, depth), np.float32))
            np.testing.assert_array_equal(native.matmul(x, w), native.matmul(x, wide))
            few = x[: native.FEW]
            np.testing.assert_array_equal(native.matmul_few(few, w), native.matmul_few(few, wide))


@pytest.mark.parametrize("kind", KINDS)
def test_linear_and_experts_are_those_of_the_wide_numbers(kind: str) -> None:
    x = jnp.asarray(RNG.standard_normal((7, 64), np.float32))
    w = with_tensor_scale(quantized(kind, 3, 8, 64), 1, 8, 1)
    for deterministic in (False, True):
        multiply = jax.jit(Products(deterministic=deterministic))
        np.testing.assert_allclose(multiply(x, w), multiply(x, w.astype(jnp.float32)), rtol=1e-6, atol=1e-5)
    gate_up = with_tensor_scale(quantized(kind, 4, 32, 2, 64), 4, 1, 2, 1)
    down = with_tensor_scale(quantized(kind, 4, 64, 32), 4, 1, 1)
    ids = jnp.asarray(RNG.integers(0, 4, (7, 2)), jnp.int32)
    share = jnp.full((7, 2), 0.5, jnp.float32)
    mix = jax.jit(lambda e: moe(x, Chosen(ids, share), e, silu_of))
    want = mix(ExpertWeights(gate_up.astype(jnp.float32), down.astype(jnp.float32)))
    atol = 1e-6 * float(jnp.abs(want).max()) + 1e-3
    np.testing.assert_allclose(mix(ExpertWeights(gate_up, down)), want, rtol=1e-4, atol=atol)
    if kind in ("mxfp8", "nvfp4"):  # the C kernel
        native.load()
        product = functools.partial(native.matmul_grouped, few=True)
        with_kernel = moe(x, Chosen(ids, share), ExpertWeights(gate_up, down), silu_of, product)
        np.testing.assert_allclose(with_kernel, want, rtol=1e-4, atol=atol)


def silu_of(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def with_tensor_scale(w: Quantized, *shape: int) -> Quantized:
    if w.scales.dtype != ml_dtypes.float8_e4m3fn:
        return w
    return dataclasses.replace(w, tensor_scale=jnp.asarray(RNG.uniform(1e-3, 1e-2, shape), jnp.float32))


def test_fp4_scales_are_the_best_of_those_tried() -> None:
    """Each group against all scales of its form: the error is the least one."""
    wide = RNG.standard_normal((40, 64)).astype(np.float32)
    numbers = np.array([*E2M1, *(-x for x in E2M1)], np.float32)
    every = {"mxfp4": 2.0 ** np.arange(-20, 20), "nvfp4": np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)}
    for kind, scales in every.items():
        group = GROUPS[kind]
        some = np.asarray(scales).astype(np.float32)
        some = some[some > 0]
        got = decoded(Quantized(*map(jnp.asarray, encode(wide, kind, group))))
        groups = wide.reshape(-1, group)
        least = np.full(len(groups), np.inf)
        for scale in some:
            nearest = np.abs(groups[..., None] / scale - numbers).argmin(axis=-1)
            least = np.minimum(least, ((numbers[nearest] * scale - groups) ** 2).sum(axis=-1))
        np.testing.assert_allclose(((got - wide) ** 2).reshape(-1, group).sum(axis=-1), least, rtol=1e-3, err_msg=kind)


@pytest.mark.parametrize(
    ("kind", "error"), [("int8", 0.006), ("fp8", 0.04), ("int4", 0.12), ("mxfp4", 0.12), ("nvfp4", 0.1)]
)
def test_encoding(kind: str, error: float) -> None:
    """No number is farther off than half a step, an all-zero group is 0, and the largest numbers are not lost."""
    wide = RNG.standard_normal((6, 256)).astype(np.float32)
    wide[0, :64], wide[1, :32], wide[2, 3], wide[3, 5] = 0, -1, 100, -70
    values, scales = encode(wide, kind, GROUPS.get(kind, 32))
    got = decoded(Quantized(jnp.asarray(values), jnp.asarray(scales)))
    assert not got[0, :64].any() and np.allclose(got[1, :32], -1)
    assert got[2, 3] > 85 and got[3, 5] < -60
    rest = (wide[4:] - got[4:]) ** 2
    assert rest.mean() ** 0.5 < error and rest.mean() > 0
