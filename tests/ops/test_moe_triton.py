"""The Triton kernels of experts, interpreted, against numpy: which rows an expert has, sizes, forms of weights."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.quantization import encode
from jaxserve.models.layers import GatedActivation, PlainActivation
from jaxserve.ops.linear import ExpertKernels, TpuExperts, TritonExperts
from jaxserve.ops.moe import Chosen, ExpertWeights, kernels_of, moe
from jaxserve.ops.quantized import Quantized
from tests.ops import test_quantized as forms
from tests.quick import QUICK, QUICK_FLAGS

KERNELS = TritonExperts(interpret=True)
SWIGLU, RELU2 = GatedActivation("silu", 0.0), PlainActivation("relu2")


@dataclasses.dataclass(frozen=True)
class Case:
    """The choices of each token, and the sizes of a layer. ids name the test."""

    id: str
    choices: tuple[tuple[int, ...], ...]
    experts: int = 4
    ffn: int = 32
    model: int = 64
    bias: bool = False
    dtype: str = "float32"
    activation: GatedActivation | PlainActivation = SWIGLU

    @property
    def parts(self) -> int:
        """Gate and up, or up alone."""
        return 2 if isinstance(self.activation, GatedActivation) else 1


CASES = [
    Case("one-row", ((2,),)),
    Case("experts-without-rows", ((0, 5), (5, 0), (7, 5)), experts=9, bias=True),
    Case("all-rows-in-one-expert", ((1,),) * 37, ffn=80, model=40),
    Case("first-and-last-expert", ((0, 3),) * 17, ffn=96, model=33, bias=True),
    Case("tiles-of-128-rows", tuple((i % 2,) for i in range(300)), experts=2, ffn=16, model=48),
    Case("bfloat16", tuple((i % 3, 3) for i in range(20)), dtype="bfloat16", bias=True, ffn=200, model=160),
    Case("gpt-oss", ((0, 2), (1, 3)), bias=True, activation=GatedActivation("clamped_swiglu", 0.4)),
    Case("gelu", ((0, 2), (1, 3)), activation=GatedActivation("gelu_tanh", 0.0)),
    Case("without-a-gate", tuple((i % 3, 3) for i in range(20)), ffn=80, bias=True, activation=RELU2),
]
FORMS = {
    "int8-32": ("int8", 32, False),
    "int8-zeros": ("int8", 64, True),
    "int4-32": ("int4", 32, False),
    "int4-zeros-64": ("int4", 64, True),
    "fp8": ("fp8", 64, False),
    "mxfp4": ("mxfp4", 32, False),
    "mxfp8": ("mxfp8", 32, False),
    "nvfp4": ("nvfp4", 16, False),
}


def draw(case: Case) -> tuple[jax.Array, jax.Array, jax.Array, ExpertWeights]:
    rng = np.random.default_rng(3)
    dtype = jnp.dtype(case.dtype)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.3, shape), dtype)

    experts = ExpertWeights(
        normal(case.experts, case.ffn, case.parts, case.model),
        normal(case.experts, case.model, case.ffn),
        normal(case.experts, case.ffn, case.parts) if case.bias else None,
        normal(case.experts, case.model) if case.bias else None,
    )
    ids = jnp.asarray(case.choices, jnp.int32)
    return normal(len(case.choices), case.model), ids, jnp.asarray(rng.random(ids.shape), jnp.float32), experts


def wide(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def oracle(case: Case, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: ExpertWeights) -> np.ndarray:
    """Every choice by itself, in float64."""
    out = np.zeros((x.shape[0], case.model))
    gate_up, down, rows = wide(experts.gate_up), wide(experts.down), wide(x)
    for token, choices in enumerate(np.asarray(ids)):
        for expert, weight in zip(choices, np.asarray(weights[token]), strict=True):
            y = gate_up[expert] @ rows[token]
            if experts.gate_up_bias is not None:
                y = y + wide(experts.gate_up_bias)[expert]
            hidden = activation(case.activation, y)
            result = down[expert] @ hidden
            out[token] += weight * (result if experts.down_bias is None else result + wide(experts.down_bias)[expert])
    return out


def activation(kind: GatedActivation | PlainActivation, y: np.ndarray) -> np.ndarray:
    if isinstance(kind, PlainActivation):
        assert kind.kind == "relu2"
        return np.square(np.maximum(y[:, 0], 0))
    gate, up = y[:, 0], y[:, 1]
    match kind.kind:
        case "silu":
            return gate / (1 + np.exp(-gate)) * up
        case "clamped_swiglu":
            gate, up = np.minimum(gate, kind.limit), np.clip(up, -kind.limit, kind.limit)
            return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        case _:
            return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def run(
    case: Case,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: ExpertWeights,
    kernels: ExpertKernels | None = KERNELS,
) -> np.ndarray:
    compiled = jax.jit(moe, static_argnums=(3, 4), compiler_options=QUICK)
    out = compiled(x, Chosen(ids, weights), experts, case.activation, kernels)
    assert out.dtype == x.dtype
    return wide(out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_numpy(case: Case) -> None:
    args = draw(case)
    tolerance = 2e-2 if case.dtype == "bfloat16" else 1e-5
    expected = oracle(case, *args)
    np.testing.assert_allclose(run(case, *args), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("form", "function"), [*((form, SWIGLU) for form in FORMS), ("fp8", RELU2), ("nvfp4", RELU2)])
def test_weights_of_few_bits(form: str, function: GatedActivation | PlainActivation) -> None:
    kind, group, zeros = FORMS[form]
    case = Case(form, ((0, 2), (2, 1), (3, 2)), ffn=64, model=128, activation=function)
    x, ids, weights, experts = draw(case)
    few = dataclasses.replace(
        experts,
        gate_up=quantized(experts.gate_up, kind, group, zeros),
        down=quantized(experts.down, kind, group, zeros),
    )
    expected = oracle(case, x, ids, weights, few)
    np.testing.assert_allclose(run(case, x, ids, weights, few), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def quantized(w: Any, kind: Any, group: int, zeros: bool) -> Quantized:
    if kind in ("mxfp8", "nvfp4"):
        few = forms.quantized(kind, *w.shape)
        if kind == "mxfp8":  # weights of at most 0.5
            few = dataclasses.replace(few, scales=few.scales // 16 + 110)
        shape = (*w.shape[:1], *(1 if size > 2 else size for size in w.shape[1:-1]), 1)  # of gate and up, and of down
        few = forms.with_tensor_scale(few, *shape)
        return few if few.tensor_scale is None else dataclasses.replace(few, tensor_scale=few.tensor_scale / 50)
    if kind == "mxfp4":
        rng = np.random.default_rng(7)
        values = rng.integers(0, 256, (*w.shape[:-1], w.shape[-1] // 2)).astype(np.uint8)
        return Quantized(
            jnp.asarray(values), jnp.asarray(rng.integers(110, 128, (*w.shape[:-1], w.shape[-1] // 32)), "uint8")
        )
    few = Quantized(*map(jnp.asarray, encode(np.asarray(w), kind, group)))
    return dataclasses.replace(few, zeros=jnp.round(few.scales * 1000) % 16) if zeros else few


def test_one_size_gives_a_row_the_same_bits_among_any_others() -> None:
    case = Case("", ((1,),) * 70)
    x, ids, weights, experts = draw(case)
    kernels = TritonExperts(one_size=True, interpret=True)
    many = run(case, x, ids, weights, experts, kernels=kernels)
    few = run(case, x[:3], ids[:3], weights[:3], experts, kernels=kernels)
    np.testing.assert_array_equal(many[:3], few)


def test_auto_takes_the_best_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [kernels_of("auto", platform) for platform in ("cpu", "gpu", "tpu")] == ["auto", "triton", "tpu"]
    assert kernels_of("xla", "gpu") == "xla"
    with pytest.raises(ConfigError, match="'triton' runs on gpu only, and this is cpu"):
        kernels_of("triton", "cpu")
    monkeypatch.setitem(sys.modules, "jaxserve.ops.moe.triton", None)
    assert kernels_of("auto", "gpu") == "xla"
    with pytest.raises(ConfigError, match="'triton' cannot be loaded with this jax"):
        kernels_of("triton", "gpu")


SPLIT = Case("split", tuple((i % 8, (i + 3) % 8) for i in range(9)), experts=8, ffn=64, model=32, bias=True)


def split_over_devices() -> list[float]:
    """The largest differences to numpy over 2 x 2 devices, tensor and expert, and over 4 of either."""
    x, ids, weights, experts = draw(SPLIT)
    return [_difference(x, ids, weights, experts, KERNELS, sizes) for sizes in ((2, 2), (4, 1), (1, 4))]


def few_bits_split_over_devices() -> list[float]:
    """The same of the TPU's kernel over 2 x 2, with weights in int8."""
    x, ids, weights, experts = draw(dataclasses.replace(SPLIT, dtype="bfloat16"))
    gate_up, down = (quantized(w, "int8", 16, False) for w in (experts.gate_up, experts.down))
    few = dataclasses.replace(experts, gate_up=gate_up, down=down)
    return [_difference(x, ids, weights, few, TpuExperts(interpret=True), (2, 2))]


def _difference(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: ExpertWeights,
    kernels: ExpertKernels,
    sizes: tuple[int, int],
) -> float:
    mesh = jax.make_mesh(sizes, ("tensor", "expert"), axis_types=(AxisType.Auto,) * 2)
    specs = ExpertWeights(P("expert", "tensor"), P("expert", None, "tensor"), P("expert", "tensor"), P("expert"))  # type: ignore
    split = jax.tree.map(
        lambda spec, leaves, mesh=mesh: jax.device_put(leaves, NamedSharding(mesh, spec)),
        specs,
        experts,
        is_leaf=lambda spec: isinstance(spec, P),
    )
    out = moe(x, Chosen(ids, weights), split, SPLIT.activation, kernels)
    return float(np.abs(wide(out) - oracle(SPLIT, x, ids, weights, experts)).max())


def test_experts_and_their_rows_split_over_devices() -> None:
    """One all-reduce adds up what each device's experts, or parts of experts, gave."""
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}", "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-c",
        "from tests.ops.test_moe_triton import *; print([split_over_devices(), few_bits_split_over_devices()])",
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wide, few = json.loads(done.stdout)
    assert max(wide) < 1e-5 and max(few) < 1e-2
