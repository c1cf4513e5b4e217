"""The TPU kernel for routed experts: interpreted against numpy and lax.ragged_dot, and lowered for a v5e."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxserve.ops.linear import Products, TpuExperts
from jaxserve.ops.moe import Chosen, ExpertWeights, _grouped_ragged_dot, moe, tpu
from jaxserve.ops.moe.tpu import GroupedBlocks, takes
from jaxserve.ops.quantized import Quantized
from tests.ops.test_moe_triton import SWIGLU, Case, draw, oracle, run
from tests.ops.test_moe_triton import quantized as encoded
from tests.ops.test_quantized import KINDS, RNG, quantized
from tests.quick import QUICK

KERNELS = TpuExperts(interpret=True)
SIZES = (5, 0, 41, 1, 0)  # rows of each expert; one more row is of none
# outputs and depth: rows of values stay as they are; XLA keeps values of 144 or 288 bytes a row with the outputs last
ROWS, TRANSPOSED = (40, 256), (256, 288)
FORMS = {
    "int8-32": ("int8", 32, False, TRANSPOSED),
    "int8-128-zeros": ("int8", 128, True, ROWS),
    "int8-96": ("int8", 96, False, TRANSPOSED),
    "int8-row": ("int8", 256, False, ROWS),
    "int4-32-zeros": ("int4", 32, True, TRANSPOSED),
    "int4-128": ("int4", 128, False, ROWS),
    "fp8-128": ("fp8", 128, False, ROWS),
    "fp8-row": ("fp8", 288, False, TRANSPOSED),
    "mxfp4": ("mxfp4", 32, False, ROWS),
    "mxfp4-transposed": ("mxfp4", 32, False, TRANSPOSED),
    "mxfp8": ("mxfp8", 32, False, ROWS),
    "nvfp4": ("nvfp4", 16, False, ROWS),
    "nvfp4-transposed": ("nvfp4", 16, False, TRANSPOSED),
    "nvfp4-long": ("nvfp4", 16, False, (32, 4352)),
    # more groups than are read at a time
    "int4-long": ("int4", 32, False, (32, 4352)),
}


def grouped(
    x: jax.Array,
    weight: jax.Array | Quantized,
    kernels: TpuExperts = KERNELS,
    sizes: tuple[int, ...] = SIZES,
    pairs: bool = False,
) -> np.ndarray:
    run = jax.jit(tpu.products, static_argnums=3, static_argnames="pairs", compiler_options=QUICK)
    return np.asarray(run(x, weight, jnp.asarray(sizes, jnp.int32), kernels, pairs=pairs).astype(jnp.float32))


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape, np.float32)).astype(jnp.bfloat16)


@pytest.mark.parametrize("form", FORMS)
def test_products(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 32 rows, so that one expert has rows in two, and others share one."""
    monkeypatch.setattr(tpu, "_CHUNK_ROWS", 32)
    kind, group, zeros, (outputs, depth) = FORMS[form]
    weight = quantized(kind, len(SIZES), 2, outputs, depth, group=group, zeros=zeros)
    x = drawn(48, depth)
    hold_to_numpy(grouped(x, weight), x, np.asarray(weight.astype(jnp.float32)))


@pytest.mark.parametrize(("outputs", "depth"), [ROWS, TRANSPOSED, (600, 1280)])
def test_products_in_bfloat16(outputs: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks as those of few bits; pairs as they are and as two weights. The last has several blocks of outputs."""
    monkeypatch.setattr(tpu, "_CHUNK_ROWS", 32)
    monkeypatch.setattr(tpu, "_MANY_BYTES", 1 << 20)
    weight, x = drawn(len(SIZES), 2, outputs, depth), drawn(48, depth)
    hold_to_numpy(grouped(x, weight), x, np.asarray(weight, np.float32))
    if depth % tpu.TPU_LANES == 0:
        got = grouped(x, jnp.moveaxis(weight, 1, 2), pairs=True)
        hold_to_numpy(got, x, np.asarray(weight, np.float32))


def hold_to_numpy(got: np.ndarray, x: jax.Array, numbers: np.ndarray) -> None:
    """Compare results [2, 48, N] of rows [48, K] with numpy's, of numbers [5, 2, N, K] of five experts."""
    ends = np.cumsum(SIZES)
    for expert, (size, end) in enumerate(zip(SIZES, ends, strict=True)):
        own = slice(end - size, end)
        want = np.einsum("mk,hnk->hmn", np.asarray(x, np.float32)[own], numbers[expert])
        np.testing.assert_allclose(got[:, own], want, rtol=1e-2, atol=1e-2 * np.abs(want).max(initial=0))


def test_visits_cover_each_row_once() -> None:
    rng = np.random.default_rng(1)
    for sizes, rows, chunk in (
        (rng.multinomial(rows, [1 / 7] * 7) * [1, 1, 0, 1, 1, 1, 0], rows, 16) for rows in (16, 96)
    ):
        visits = tpu.Visits.of(jnp.asarray(sizes, jnp.int32), rows, chunk)
        owner = np.repeat(np.arange(7), sizes)
        found = np.full(rows, -1)
        for expert, at, first, end in zip(*map(np.asarray, visits), strict=True):
            own = found[at * chunk + first : at * chunk + end] if end else found[:0]
            assert (own == -1).all() and 0 <= at < -(-rows // chunk)
            own[:] = expert
        np.testing.assert_array_equal(found[: len(owner)], owner)
        assert (found[len(owner) :] == -1).all()
        assert (np.diff(visits.chunk) >= 0).all()  # a chunk's result is written once


def test_no_row_has_an_expert() -> None:
    visits = tpu.Visits.of(jnp.zeros(4, jnp.int32), 16, 16)
    assert not np.asarray(visits.end).any() and set(np.asarray(visits.chunk)) == {0}


@pytest.mark.parametrize(("kind", "model"), [("int8", 128), ("bfloat16", 128), ("bfloat16", 96)])
def test_a_layer_equals_numpy(kind: str, model: int) -> None:
    case = Case("", ((0, 2), (2, 1), (3, 2)), ffn=64, model=model, dtype="bfloat16", bias=True)
    x, ids, weights, experts = draw(case)
    if kind == "int8":
        gate_up, down = (encoded(w, "int8", 32, False) for w in (experts.gate_up, experts.down))
        experts = dataclasses.replace(experts, gate_up=gate_up, down=down)
    want = oracle(case, x, ids, weights, experts)
    for kernels in (KERNELS, None):
        got = run(case, x, ids, weights, experts, kernels)
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * np.abs(want).max())


def test_a_wide_layer_equals_a_ragged_product() -> None:
    """With rows of no expert, whose results nobody reads."""
    experts = ExpertWeights(drawn(5, 64, 2, 128), drawn(5, 128, 64))
    rows, sizes = drawn(48, 128), jnp.asarray(SIZES, jnp.int32)
    got = np.asarray(tpu.run_rows(rows, sizes, experts, activation=SWIGLU, kernels=KERNELS), np.float32)[:47]
    want = np.asarray(_grouped_ragged_dot(rows, sizes, experts, SWIGLU), np.float32)[:47]
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2 * np.abs(want).max())


def test_one_size_gives_a_row_the_same_bits_among_any_others() -> None:
    weight = quantized("int8", len(SIZES), 1, 64, 128)
    x = jnp.asarray(RNG.standard_normal((512, 128), np.float32)).astype(jnp.bfloat16)
    kernels = TpuExperts(one_size=True, interpret=True)
    few, many = (grouped(x[:rows], weight, kernels, (0, 0, own, 0, 0)) for rows, own in ((128, 3), (512, 500)))
    np.testing.assert_array_equal(few[:, :3], many[:, :3])


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize(("experts", "outputs", "depth"), [(8, 14336, 4096), (128, 768, 2048), (256, 2048, 7168)])
def test_with_one_size_a_product_is_as_large_for_any_rows(pairs: bool, experts: int, outputs: int, depth: int) -> None:
    """The shapes are those of Mixtral, Qwen3-30B-A3B and DeepSeek-V3."""
    shape = (experts, outputs, 2, depth) if pairs else (experts, 1, outputs, depth)
    weight: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    rows = (128, 512, 1024, 1152, 8192)
    found = [GroupedBlocks.of(count, weight, pairs=pairs, one_size=True) for count in rows]
    assert len({(each.outputs, each.tile) for each in found}) == 1


def lowered(experts: ExpertWeights, dtype: Any = jnp.bfloat16, tokens: int = 8, **options: Any) -> str:
    def layer(x: jax.Array, chosen: Chosen, experts: ExpertWeights) -> jax.Array:
        product = Products(experts="tpu", **options).of_experts(x.dtype, experts.gate_up, experts.down)
        return moe(x, chosen, experts, SWIGLU, product)

    x = jax.ShapeDtypeStruct((tokens, experts.down.shape[1]), dtype)
    chosen: Any = Chosen(*(jax.ShapeDtypeStruct((tokens, 2), each) for each in (jnp.int32, jnp.float32)))  # type: ignore
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(layer).trace(x, chosen, experts).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_two_kernels(kind: str) -> None:
    def weight(*shape: int) -> Any:
        small = quantized(kind, 8, 256)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*shape[:-1], leaf.shape[1] * shape[-1] // 256), leaf.dtype), small
        )

    few = ExpertWeights(weight(16, 768, 2, 2048), weight(16, 2048, 768))
    assert lowered(few).count("tpu_custom_call") == lowered(few, deterministic=True).count("tpu_custom_call") == 2
    assert "tpu_custom_call" not in lowered(few, jnp.float32)
    mixed = dataclasses.replace(few, down=wide(16, 2048, 768))
    assert lowered(mixed).count("tpu_custom_call") == 2
    assert "tpu_custom_call" not in lowered(dataclasses.replace(few, down=wide(16, 2048, 768, dtype=jnp.float16)))


def wide(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_wide_gate_and_up_are_given_to_the_kernel_as_pairs() -> None:
    """Compiled for a v5e and a v6e nothing copies them, see benchmarks/compiled/experts.py."""
    text = lowered(ExpertWeights(wide(16, 768, 2, 2048), wide(16, 2048, 768)))
    assert text.count("tpu_custom_call") == 2
    assert "tensor<16x768x2x2048xbf16>" in next(line for line in text.splitlines() if "tpu_custom_call" in line)
    assert "stablehlo.transpose" not in text


def test_few_rows_of_experts_that_are_kept_last_are_left_to_xla() -> None:
    odd = ExpertWeights(wide(128, 160, 2, 288), wide(128, 288, 160))
    assert "ragged_dot" in lowered(odd) and "tpu_custom_call" not in lowered(odd)
    for text in (lowered(odd, tokens=512), lowered(odd, deterministic=True)):
        assert text.count("tpu_custom_call") == 2
    fewer = ExpertWeights(wide(64, 160, 2, 288), wide(64, 288, 160))
    assert lowered(fewer).count("tpu_custom_call") == 2


def test_a_mixture_of_quantized_and_wide_experts_is_never_left_to_xla() -> None:
    """XLA would widen the quantized one in every step."""
    few: Any = Quantized(wide(128, 160, 2, 288, dtype=jnp.int8), wide(128, 160, 2, 1, dtype=jnp.float32))
    few_down: Any = Quantized(wide(128, 288, 160, dtype=jnp.int8), wide(128, 288, 1, dtype=jnp.float32))
    gate_up, down = wide(128, 160, 2, 288), wide(128, 288, 160)
    rows, kernels = wide(8, 288), TpuExperts()
    assert not takes(rows, ExpertWeights(gate_up, down), kernels)
    for experts in (ExpertWeights(few, down), ExpertWeights(gate_up, few_down), ExpertWeights(few, few_down)):
        assert takes(rows, experts, kernels)
    assert takes(rows, ExpertWeights(gate_up, down), TpuExperts(one_size=True))
    assert takes(wide(513, 288), ExpertWeights(gate_up, down), kernels)
