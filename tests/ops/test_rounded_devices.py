"""Products of activations rounded to 8 bits on GPUs and TPUs: beside numpy's, by XLA on this CPU and interpreted."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxserve.errors import ConfigError
from jaxserve.ops.linear import Products, few_bits, few_bits_tpu, rounded
from jaxserve.ops.linear.rounded import Device
from jaxserve.ops.paged_attention import get_backend
from jaxserve.ops.quantized import Quantized
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.numeric_check import serving_cases, wrong_numbers
from jaxserve.runtime.runner_setup import chosen_products, chosen_rounding
from tests.ops.test_quantized import RNG, decoded, quantized

INTERPRETS = pytest.mark.skipif(
    "InterpretGPUParams" not in dir(plgpu), reason="the Mosaic GPU interpreter needs jax 0.11 (Python 3.12)"
)
E4M3 = ml_dtypes.float8_e4m3fn


def rounded_by_numpy(x: np.ndarray, kind: str, group: int) -> np.ndarray:
    """Round each group of a row to 127 steps of its largest number, or to E4M3 with 448 for it."""
    groups = x.astype(np.float32).reshape(len(x), -1, group)
    largest = np.maximum(np.abs(groups).max(axis=2, keepdims=True), np.float32(1e-30))
    limit = 127 if kind == "int8" else 448
    steps = groups * (np.float32(limit) / largest)
    steps = np.rint(steps) if kind == "int8" else steps.astype(E4M3).astype(np.float32)
    return (steps * (largest.astype(np.float64) / limit)).reshape(x.shape)


def rows(count: int, depth: int) -> jax.Array:
    """Rows of different sizes, one of zeros among them."""
    x = RNG.standard_normal((count, depth)) * np.exp(3 * RNG.standard_normal((count, 1)))
    x[0] = 0
    return jnp.asarray(x.astype(np.float32)).astype(jnp.bfloat16)


def check(kind: str, count: int, depth: int, group: int, outputs: int) -> None:
    """Compare a product in float32 with numpy's, of numbers rounded there."""
    w = quantized(kind, outputs, depth, group=group)
    x = rows(count, depth)
    want = rounded_by_numpy(np.asarray(x), kind, group) @ decoded(w).astype(np.float64).T
    multiply = jax.jit(functools.partial(rounded.matmul, out_dtype=jnp.float32, interpret=True))
    got = multiply(x, w)
    bound = 2e-5 * np.abs(want).max(axis=1, keepdims=True) + 1e-30
    assert np.all(np.abs(np.asarray(got) - want) <= bound), np.max(np.abs(np.asarray(got) - want) / bound)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("count", "depth"), [(1, 384), (8, 96), (600, 352)])
def test_rows_with_one_scale(kind: str, count: int, depth: int) -> None:
    check(kind, count, depth, depth, outputs=40)


def test_a_tpu_multiplies_gate_and_up_as_they_lie() -> None:
    """With the bits of any other order."""
    w, x = quantized("int8", 5, 2, 64, group=64), rows(rounded.FEW_ROWS + 1, 64)
    got, want = Products(rounded="tpu")(x, w), Products(rounded="gpu")(x, w)
    assert got.shape == (len(x), 5, 2)
    np.testing.assert_array_equal(got, want)


@INTERPRETS
@pytest.mark.parametrize(("kind", "group"), [("int8", 128), ("fp8", 128), ("fp8", 256)])
@pytest.mark.parametrize("count", [1, 600])
def test_groups(kind: str, group: int, count: int) -> None:
    check(kind, count, 768, group, outputs=128)


def test_groups_of_outputs_without_whole_tiles() -> None:
    """Wide, with the numbers of bfloat16."""
    w, x = quantized("fp8", 40, 256, group=128), rows(5, 256)
    want = rounded_by_numpy(np.asarray(x), "fp8", 128) @ decoded(w).astype(np.float64).T
    got = rounded.matmul(x, w, jnp.float32)
    np.testing.assert_allclose(got, want, atol=5e-3 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_number_that_is_none_stays_in_its_row(kind: str) -> None:
    w, x = quantized(kind, 16, 64, group=64), RNG.standard_normal((4, 64), np.float32)
    clean = np.asarray(rounded.matmul(jnp.asarray(x), w, jnp.float32))
    x[1, 7], x[2, 9] = np.nan, np.inf
    got = np.asarray(rounded.matmul(jnp.asarray(x), w, jnp.float32))
    assert not np.isfinite(got[1:3]).any()
    np.testing.assert_array_equal(got[[0, 3]], clean[[0, 3]])


def lowered(count: int, w: Any, device: Device, **options: Any) -> str:
    x = jax.ShapeDtypeStruct((count, w.shape[-1]), jnp.bfloat16)
    platform, few = ("tpu", "tpu") if device == "tpu" else ("cuda", "gpu")
    kind = AbstractDevice("TPU v6e", 1, "tpu") if device == "tpu" else AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        traced = jax.jit(Products(few_bits=few, rounded=device, **options)).trace(x, w)  # type: ignore[arg-type]
        return traced.lower(lowering_platforms=(platform,)).as_text()


def weight(kind: str, group: int, zeros: bool = False) -> Any:
    dtype = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}[kind]
    values: Any = jax.ShapeDtypeStruct((1024, 2048), dtype)
    shared: Any = jax.ShapeDtypeStruct((1024, 2048 // group), jnp.float32)
    return Quantized(values, shared, shared if zeros else None)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("kind", "form"), [("int8", "i8"), ("fp8", "f8E4M3FN")])
def test_a_linear_layer_is_rounded_for_many_rows(kind: str, form: str) -> None:
    by_row, in_groups = weight(kind, 2048), weight(kind, 128)
    product = f"(tensor<600x2048x{form}>, tensor<1024x2048x{form}>)"
    for device in ("gpu", "hopper", "tpu"):
        assert (product in lowered(600, by_row, device)) == (kind == "int8" or device != "tpu")
        assert "mosaic_gpu" not in lowered(600, by_row, device)
        assert product not in lowered(rounded.FEW_ROWS, by_row, device)
        assert product not in lowered(600, by_row, device, deterministic=True)
        assert product not in lowered(600, weight(kind, 2048, zeros=True), device)
        assert ("custom_call @mosaic_gpu" in lowered(600, in_groups, device)) == (device == "hopper")
    for exact in (weight(kind, 64), weight(kind, 128, zeros=True)):
        assert "mosaic_gpu" not in lowered(600, exact, "hopper")
    assert "mosaic_gpu" not in lowered(rounded.FEW_ROWS, in_groups, "hopper")


@pytest.mark.parametrize(("kind", "group"), [("int8", 256), ("fp8", 256), ("fp8", 128)])
def test_a_row_has_its_numbers_among_few_and_many(kind: str, group: int) -> None:
    """With groups but for bfloat16's rounding, which is finer than that to 8 bits."""
    w, x = quantized(kind, 40, 256, group=group), rows(rounded.FEW_ROWS + 3, 256)
    few, exact = (np.asarray(Products(rounded=device)(x[:9], w, out_dtype=jnp.float32)) for device in ("hopper", None))
    many = np.asarray(Products(rounded="hopper")(x, w, out_dtype=jnp.float32))[:9]
    sizes = np.abs(many).max(axis=1, keepdims=True) + 1e-30
    off, by_rounding = (np.mean(np.abs(other - many) / sizes) for other in (few, exact))
    assert off < (1e-5 if group == 256 else by_rounding / 2)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("kernel", "shape"), [(few_bits, (40, 256)), (few_bits_tpu, (64, 2, 256))])
def test_the_kernel_of_few_rows_gives_the_numbers_of_many(kernel: Any, shape: tuple[int, ...]) -> None:
    w, x = quantized("int8", *shape, group=256), rows(9, 256)
    product = functools.partial(kernel.matmul, interpret=True)
    few = rounded.multiply_wide(product, jnp.bfloat16, rounded.rounded(x, w), w, jnp.float32)
    many = rounded.matmul(x, w, jnp.float32)
    assert few.shape == many.shape == (9, *shape[:-1])
    np.testing.assert_allclose(few, many, atol=1e-6 * np.abs(many).max())


def test_the_check_at_the_start_has_them() -> None:
    cpu = make_mesh("cpu")
    cases = serving_cases(None, cpu, jnp.dtype("bfloat16"), deterministic=False, rounded="gpu")
    [case] = [case for case in cases if case.name == "rounded products"]
    assert len(case.expected) == 2
    assert not wrong_numbers([case], cpu.devices[0], {})


def setup_of(
    asked: str, platform: str = "gpu", capability: str = "9.0", *, made_for: bool = True, **form: Any
) -> tuple[Any, ...]:
    """What the choice is made of, for a model of one weight. form: of the weight."""
    form = {"dtype": "int8", "group": 256, "zeros": False, "axes": (), "deterministic": False, "moe": None} | form
    kind = "fp8" if form["dtype"] == "float8_e4m3fn" else "int8"
    packing = SimpleNamespace(role="values", kind=kind, wide=(64, 256), group=form["group"], zeros=form["zeros"])
    spec = SimpleNamespace(dtype=jnp.dtype(form["dtype"]), packing=packing, axes=form["axes"])
    stored = SimpleNamespace(rounds_activations=made_for)
    config = SimpleNamespace(stored_form=stored, quantization="stored", moe=form["moe"], gated_mlp=True)
    structure = SimpleNamespace(specs=[spec], activation_dtype=jnp.dtype(form.get("activations", "bfloat16")))
    loaded: Any = SimpleNamespace(structure=structure, config=config, directory="here")
    device = SimpleNamespace(platform=platform, compute_capability=capability, device_kind="")
    mesh: Any = SimpleNamespace(platform=platform, devices=[device])
    resolved: Any = SimpleNamespace(activations=asked, deterministic=form["deterministic"], experts="auto")
    return resolved, loaded, mesh, None if form.get("encoder") else get_backend("xla", "cpu")


def chosen(*asked: str, **form: Any) -> str | None:
    return chosen_rounding(*setup_of(*asked, **form))


def test_the_log_says_which_products_a_model_has(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert chosen_products(*setup_of("auto", "tpu")).rounded == "tpu"
    assert "runtime.activations auto: activations are rounded to 8 bits" in caplog.text
    for exact in (setup_of("exact", "tpu"), setup_of("auto", "cpu"), setup_of("auto", "tpu", group=128)):
        caplog.clear()
        assert chosen_products(*exact).rounded is None
        assert "here was made for activations of 8 bits, which are not rounded here" in caplog.text
    caplog.clear()
    chosen_products(*setup_of("auto", "cpu", made_for=False))
    assert not caplog.text


@pytest.mark.parametrize(
    ("platform", "form", "words"),
    [
        ("gpu", {}, "triton"),
        ("tpu", {}, "tpu, but xla for few rows of bfloat16 weights that it keeps with the experts last"),
        ("tpu", {"deterministic": True}, "tpu"),
        ("tpu", {"activations": "float32"}, "xla"),
        ("cpu", {"activations": "float32"}, "xla"),
    ],
)
def test_the_log_says_what_multiplies_by_experts(
    caplog: pytest.LogCaptureFixture, platform: str, form: dict[str, Any], words: str
) -> None:
    caplog.set_level(logging.INFO)
    chosen_products(*setup_of("auto", platform, moe="of a model with experts", **form))
    assert f"runtime.experts auto on {platform}: {words}" in [record.getMessage() for record in caplog.records]


def test_auto_rounds_for_checkpoints_that_were_made_for_it() -> None:
    assert chosen("auto") == "hopper"
    assert chosen("auto", capability="8.9") == "gpu"
    assert chosen("auto", "tpu") == "tpu"
    assert chosen("auto", group=128) == "hopper"
    assert chosen("auto", dtype="float8_e4m3fn", group=128) == "hopper"
    exact: list[dict[str, Any]] = [
        {"platform": "cpu"},
        {"capability": "8.0"},
        {"made_for": False},
        {"platform": "tpu", "group": 128},
        {"platform": "tpu", "dtype": "float8_e4m3fn"},
        {"capability": "8.9", "group": 128},
        {"group": 64},
        {"zeros": True},
        {"dtype": "uint8"},
        {"axes": ("expert",)},
        {"deterministic": True},
        {"encoder": True},
    ]
    assert {chosen("auto", **form) for form in exact} == {None}
    assert chosen("exact") is None


def test_what_cannot_be_rounded_is_refused_by_name() -> None:
    assert chosen("rounded", made_for=False) == "hopper"
    effect = "'rounded' has an effect here only on linear layers in int8.* without zeros, with one scale for a row"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"platform": "tpu", "group": 128}, f"{effect}, but not on routed experts"),
        ({"group": 64}, f"{effect}, or one for each multiple of 128 numbers, but"),
        ({"axes": ("expert",)}, effect),
        ({"capability": "8.0"}, "'rounded' needs a GPU of compute capability 8.9"),
        ({"deterministic": True}, "'rounded' and runtime.deterministic work together on a CPU only"),
        ({"encoder": True}, "'rounded' is for decoders"),
    ]
    for form, message in refused:
        with pytest.raises(ConfigError, match=message):
            chosen("rounded", **form)
