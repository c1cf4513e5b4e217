"""Products of rounded activations on a CPU: numbers beside numpy's, bits that depend on no neighbour, and refusals."""

import ctypes
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.quantization import encode
from jaxserve.ops import kernel_library, native
from jaxserve.ops.linear import Products
from jaxserve.ops.native import Weight
from jaxserve.ops.paged_attention import get_backend
from jaxserve.ops.quantized import Quantized
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.numeric_check import serving_cases, wrong_numbers
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import chosen_rounding
from tests.ops import emulated
from tests.ops.test_native import _loaded  # noqa: F401

RNG = np.random.default_rng(5)
# form, rows of w around the heights of tiles, depth, numbers that share a scale of w
CASES = [("bfloat16", 61, 96, 0), ("bfloat16", 5, 50, 0), ("int8", 25, 256, 128), ("int8", 7, 160, 160)]
CASES += [("int8", 1, 192, 192), ("int4", 31, 256, 32), ("int4", 24, 256, 128)]
CASES += [("int8", 6, 224, 32), ("int4", 9, 288, 96)]  # scales that change within 64 bytes of w, a short end
TOKENS = [1, 2, 4, 5, 8, 9, 16, 17, 33, 70]


@pytest.fixture(autouse=True)
def _can_round() -> None:
    if not native.can_round(jnp.int8):
        pytest.skip("no AVX2 or dot products of NEON")


def _weight(form: str, rows: int, depth: int, group: int, zeros: bool = False) -> Weight:
    if form == "bfloat16" and not native.can_round(jnp.bfloat16):
        pytest.skip("no AVX512_BF16")
    wide = RNG.standard_normal((rows, depth), np.float32)
    if form == "bfloat16":
        return jnp.asarray(wide, jnp.bfloat16)
    values, scales = encode(wide, form, group)
    some = jnp.asarray(RNG.integers(-3, 12, scales.shape).astype(np.float32)) if zeros else None
    return Quantized(jnp.asarray(values), jnp.asarray(scales), some)


def _rounded(x: np.ndarray, form: str, group: int) -> np.ndarray:
    """Round x as numpy does it: to bfloat16, or to 127 steps of the largest number of a group."""
    if form == "bfloat16":
        return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    size = next(size for size in (128, 96, 64, 32) if group % size == 0)
    groups = x.reshape(len(x), -1, size)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    steps = np.rint(groups * (127 / largest))  # in float32: a number halfway between two steps goes as in the kernel
    return (steps * (largest.astype(np.float64) / 127)).reshape(x.shape)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("zeros", [False, True])
def test_the_numbers_are_those_of_rounded_activations(case: tuple[str, int, int, int], zeros: bool) -> None:
    """And a row has the same bits alone and among others, with `few` among those that one kernel takes."""
    form, rows, depth, group = case
    if zeros and form == "bfloat16":
        pytest.skip("it has no zeros")
    w = _weight(form, rows, depth, group, zeros)
    x = RNG.standard_normal((max(TOKENS), depth), np.float32) * np.exp(RNG.standard_normal((max(TOKENS), 1)))
    x = x.astype(np.float32)
    want = _rounded(x, form, group) @ np.asarray(w.astype(jnp.float32), np.float64).T
    bound = 2e-5 * np.abs(want).max(axis=1, keepdims=True)
    alone = np.concatenate([native.matmul_rounded(jnp.asarray(x[i : i + 1]), w) for i in range(len(x))])
    for tokens in TOKENS:
        got = np.asarray(native.matmul_rounded(jnp.asarray(x[:tokens]), w))
        assert np.all(np.abs(got - want[:tokens]) <= bound[:tokens])
        np.testing.assert_array_equal(got, alone[:tokens])
        few = np.asarray(native.matmul_rounded(jnp.asarray(x[:tokens]), w, few=True))
        assert np.all(np.abs(few - want[:tokens]) <= bound[:tokens])
    few_avx2 = ((1, 4), (2, 4), (5, 8))
    others = ((1, 8), (4, 8)) if native.can_round(jnp.bfloat16) else few_avx2
    for low, high in ((2, 4), (5, 8)) if form == "bfloat16" else others:
        some, more = (native.matmul_rounded(jnp.asarray(x[:n]), w, few=True) for n in (low, high))
        np.testing.assert_array_equal(some, more[:low])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a level of x86-64")
def test_the_numbers_of_other_processors_with_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their code, also if this processor has better."""
    monkeypatch.setattr(kernel_library, "SOURCES", ("matmul_rounded.c", "matmul_rounded_few_avx2.c"))
    flags = [flag.replace("native", "x86-64-v3") for flag in kernel_library.FLAGS]
    library = ctypes.CDLL(str(kernel_library.build(tmp_path, flags)))
    for name in ("_ROUNDED", "_ROUNDED_FEW"):
        symbol = getattr(library, getattr(native, name))
        jax.ffi.register_ffi_target(f"{name}_avx2", jax.ffi.pycapsule(symbol), platform="cpu")
        monkeypatch.setattr(native, name, f"{name}_avx2")
    monkeypatch.setattr(native, "can_round", lambda dtype: dtype != jnp.bfloat16)
    for case in (CASES[3], CASES[5], CASES[7]):
        test_the_numbers_are_those_of_rounded_activations(case, True)


@pytest.mark.slow
def test_the_numbers_with_neon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.use(monkeypatch, tmp_path, "armv8.2-a+dotprod")
    monkeypatch.setattr(f"{__name__}.TOKENS", [1, 2, 4, 5, 9, 17])
    for case in CASES[2:]:
        test_the_numbers_are_those_of_rounded_activations(case, True)
    for case in (CASES[3], CASES[5], CASES[6]):
        test_the_numbers_are_those_of_rounded_activations(case, False)
    test_a_number_that_is_none_stays_in_its_row(CASES[8])


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_a_number_that_is_none_stays_in_its_row(case: tuple[str, int, int, int]) -> None:
    w = _weight(*case)
    for tokens in (3, 8, 20):
        x = RNG.standard_normal((tokens, case[2]), np.float32)
        clean = np.asarray(native.matmul_rounded(jnp.asarray(x), w))
        x[1, 7] = np.nan
        x[2, 9] = np.inf
        for few in (False, True):
            got = np.asarray(native.matmul_rounded(jnp.asarray(x), w, few=few))
            assert not np.isfinite(got[1:3]).any()
            np.testing.assert_allclose(got[3:], clean[3:], atol=1e-4)
            np.testing.assert_allclose(got[0], clean[0], atol=1e-4)
    zero = native.matmul_rounded(jnp.zeros((9, case[2])), w)
    np.testing.assert_array_equal(zero, 0)


def test_which_weights_have_them() -> None:
    lines = {"float32": 0, "bfloat16": native.can_round(jnp.bfloat16), "float8_e4m3fn": 0, "int8": 1}
    for dtype, has in lines.items():
        values = jnp.zeros((8, 64), dtype)
        w = values if has is None or dtype.startswith(("float32", "bf")) else Quantized(values, jnp.ones((8, 2)))
        text = jax.jit(Products(native=True, rounded="cpu")).lower(jnp.zeros((9, 64)), w).as_text()
        assert ("matmul_rounded" in text) == bool(has), dtype
        assert "matmul_rounded" not in jax.jit(Products(native=True)).lower(jnp.zeros((9, 64)), w).as_text()


def test_the_check_at_the_start_has_them() -> None:
    cpu = make_mesh("cpu")
    backend = get_backend("native", "cpu")
    cases = serving_cases(backend, cpu, jnp.dtype("float32"), deterministic=False, rounded="cpu")
    [case] = [case for case in cases if case.name == "rounded products"]
    assert not wrong_numbers([case], cpu.devices[0], {})
    wrong = replace(case, expected=(case.expected[0] + 1, *case.expected[1:]))
    assert wrong_numbers([wrong], cpu.devices[0], {})


def _asked(
    dtypes: list[str], attention: str = "native", group: int = 32, kind: str = "int8", axes: tuple[str, ...] = ()
) -> str | None:
    config = Config.model_validate({"runtime": {"activations": "rounded"}})
    packing = SimpleNamespace(group=group, kind=kind)
    specs = [SimpleNamespace(dtype=jnp.dtype(d), packing=None if "float" in d else packing, axes=axes) for d in dtypes]
    loaded: Any = SimpleNamespace(structure=SimpleNamespace(specs=specs))
    resolved: Any = SimpleNamespace(activations=config.runtime.activations)
    backend = None if attention == "none" else get_backend(attention, "cpu")
    return chosen_rounding(resolved, loaded, make_mesh("cpu"), backend)


def test_what_cannot_have_them_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunnerConfig.__dataclass_fields__["activations"].default == "auto"
    assert _asked(["bfloat16", "int8"]) and _asked(["float32", "uint8"])
    with pytest.raises(ConfigError, match="has no effect on weights in float32, FP8, MXFP4 or NVFP4"):
        _asked(["float32", "float8_e4m3fn"])
    others: list[dict[str, Any]] = [{"group": 16}, {"kind": "mxfp4"}, {"axes": ("expert",)}]
    for unlike in others:
        with pytest.raises(ConfigError, match="with a scale for 16 numbers, or of routed experts"):
            _asked(["float32", "uint8"], **unlike)
    for attention in ("xla", "none"):
        with pytest.raises(ConfigError, match=r"activations 'rounded' on a CPU is for decoders on one"):
            _asked(["int8"], attention)
    wide = "needs a processor with AVX512_BF16 and AVX512_VNNI, for weights in bfloat16"
    narrow = "needs a processor with AVX2 or NEON's dot products, for weights in int8 and int4"
    cases = ((0, ["bfloat16"], wide), (0, ["int8", "bfloat16"], narrow), (1, ["float32", "bfloat16"], wide))
    for rounds, forms, needs in cases:
        monkeypatch.setattr(native, "load", lambda rounds=rounds: SimpleNamespace(jaxserve_rounds=lambda: rounds))
        with pytest.raises(ConfigError, match=needs):
            _asked(forms)
    assert _asked(["bfloat16", "int8"]) and _asked(["uint8"])
    monkeypatch.setattr(native, "load", lambda: SimpleNamespace(jaxserve_rounds=lambda: 2))
    assert _asked(["bfloat16"])
