"""The check of the numbers: right here, with every backend; a wrong kernel and jaxlib 0.10.2's mistake are found."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.ops.linear import Products, TpuExperts, TritonExperts
from jaxserve.ops.moe import kernels_of
from jaxserve.ops.paged_attention import AttentionMetadata, AttentionSpec, backend_names, get_backend
from jaxserve.ops.paged_attention.reference import ReferenceBackend
from jaxserve.ops.paged_attention.scaled_pages import Pages
from jaxserve.runtime import numeric_check
from jaxserve.runtime.compilation.compiler import compiler_options
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.numeric_check import (
    NumericCase,
    attention_case,
    check_numbers,
    experts,
    sampler,
    serving_cases,
    sums,
    wrong_numbers,
)

CPU = make_mesh("cpu")
OPTIONS = compiler_options("cpu")
FLOAT32 = jnp.dtype("float32")


@dataclass(frozen=True)
class LastRowLost(ReferenceBackend):
    """A backend that gives another row's numbers in the last row, as a miscompiled remainder does."""

    name: str = "broken"

    def attend(
        self,
        q: jax.Array,
        cache: Pages,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        out = super().attend(q, cache, metadata, spec, sinks)
        return out.at[-1].set(out[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_that_serve_are_right(dtype: str, deterministic: bool) -> None:
    for backend, of_experts in ((get_backend("auto", "cpu"), "auto"), (None, None)):
        cases = serving_cases(backend, CPU, jnp.dtype(dtype), deterministic=deterministic, of_experts=of_experts)
        check_numbers(cases, CPU, deterministic=deterministic)


@pytest.mark.parametrize("name", backend_names("cpu"))
def test_each_backend_is_right(name: str) -> None:
    assert not wrong_numbers([attention_case(get_backend(name, "cpu"), CPU, FLOAT32)], CPU.devices[0], OPTIONS)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_experts_of_each_kernel_are_right_and_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's in Pallas' interpreter, as a GPU would check them."""
    interpreted = TritonExperts(interpret=True)
    monkeypatch.setattr(Products, "of_experts", lambda self, *_: interpreted if self.experts == "triton" else None)
    cases = [experts(Products(experts=name), FLOAT32, 1e-4) for name in ("xla", "triton")]
    for case in cases:
        assert not wrong_numbers([case], CPU.devices[0], OPTIONS)
    rotated = NumericCase("experts", cases[0].function, cases[0].inputs, (cases[0].expected[0][:, ::-1],), 1e-4)
    assert wrong_numbers([rotated], CPU.devices[0], OPTIONS)


def test_the_experts_of_a_tpu_are_right_in_all_forms_and_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Pallas' interpreter, as a TPU would check them."""
    monkeypatch.setattr(Products, "of_experts", lambda *_: TpuExperts(interpret=True))
    monkeypatch.setattr(numeric_check, "expert_kernels", lambda name, _: kernels_of(name, "tpu"))
    cases = serving_cases(None, CPU, jnp.dtype("bfloat16"), deterministic=False, of_experts="auto")
    [wide, few] = [case for case in cases if case.name.startswith("experts")]
    assert (len(wide.expected), len(few.expected)) == (1, 2)
    assert not wrong_numbers([wide, few], CPU.devices[0], OPTIONS)
    for index, right in enumerate(few.expected):
        rotated = (*few.expected[:index], right[:, ::-1], *few.expected[index + 1 :])
        assert wrong_numbers([dataclasses.replace(few, expected=rotated)], CPU.devices[0], OPTIONS)


def test_only_a_model_of_experts_has_their_case() -> None:
    names = [
        [case.name for case in serving_cases(None, CPU, FLOAT32, deterministic=False, of_experts=of)]
        for of in (None, "xla")
    ]
    assert names == [["sums", "matrix products"], ["sums", "matrix products", "experts"]]


def test_a_wrong_backend_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        check_numbers(serving_cases(LastRowLost(), CPU, FLOAT32, deterministic=False), CPU, deterministic=False)
    line = str(caught.value)
    assert "computes wrong numbers" in line and "attention broken: " in line and "\n" not in line
    assert "jaxserve doctor" in (caught.value.fix or "")


@pytest.mark.parametrize("case", [sums(), sampler()], ids=lambda case: case.name)
def test_one_wrong_number_is_found(case: NumericCase) -> None:
    for index, right in enumerate(case.expected):
        wrong = np.array(right)
        wrong[-1] += 1
        expected = (*case.expected[:index], wrong, *case.expected[index + 1 :])
        changed = NumericCase(case.name, case.function, case.inputs, expected)
        [problem] = wrong_numbers([changed], CPU.devices[0], OPTIONS)
        assert problem.startswith(f"{case.name}: ")


def test_numbers_that_are_nan_are_wrong() -> None:
    case = NumericCase("nan", lambda x: (x * jnp.nan,), (np.ones(3, np.float32),), (np.ones(3),), tolerance=9.0)
    assert wrong_numbers([case], CPU.devices[0], OPTIONS) == ["nan: 3 of 3 differ, nan is 1"]


def test_the_options_of_this_jaxlib_are_what_make_its_sums_right() -> None:
    """Not on every processor: the mistake depends on the width of its vectors."""
    without = wrong_numbers([sums()], CPU.devices[0], {})
    assert not wrong_numbers([sums()], CPU.devices[0], OPTIONS)
    if without:
        assert OPTIONS, "this jaxlib is wrong without an option, and none is set"


def test_an_encoder_has_no_attention_case() -> None:
    assert [case.name for case in serving_cases(None, CPU, FLOAT32, deterministic=False)] == ["sums", "matrix products"]
