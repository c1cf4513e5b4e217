"""The TPU kernel for experts in 8 and 4 bits: interpreted against numpy, and lowered for a v5e."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxserve.ops.linear import Products, TpuExperts
from jaxserve.ops.moe import Chosen, ExpertWeights, moe, tpu
from jaxserve.ops.quantized import Quantized
from tests.ops.test_moe_triton import SWIGLU, Case, draw, oracle, run
from tests.ops.test_moe_triton import quantized as encoded
from tests.ops.test_quantized import KINDS, RNG, quantized
from tests.quick import QUICK

KERNELS = TpuExperts(interpret=True)
SIZES = (5, 0, 41, 1, 0)  # rows of each expert; one more row is of none
# outputs and depth: rows of values stay as they are; XLA turns values of 144 or 288 bytes a row
ROWS, TURNED = (40, 256), (256, 288)
FORMS = {
    "int8-32": ("int8", 32, False, TURNED),
    "int8-128-zeros": ("int8", 128, True, ROWS),
    "int8-96": ("int8", 96, False, TURNED),
    "int8-row": ("int8", 256, False, ROWS),
    "int4-32-zeros": ("int4", 32, True, TURNED),
    "int4-128": ("int4", 128, False, ROWS),
    "fp8-128": ("fp8", 128, False, ROWS),
    "fp8-row": ("fp8", 288, False, TURNED),
    "mxfp4": ("mxfp4", 32, False, ROWS),
    "mxfp4-turned": ("mxfp4", 32, False, TURNED),
    # more groups than are read at a time
    "int4-long": ("int4", 32, False, (32, 4352)),
}


def grouped(
    x: jax.Array, weight: Quantized, kernels: TpuExperts = KERNELS, sizes: tuple[int, ...] = SIZES
) -> np.ndarray:
    run = jax.jit(tpu.products, static_argnums=3, compiler_options=QUICK)
    return np.asarray(run(x, weight, jnp.asarray(sizes, jnp.int32), kernels).astype(jnp.float32))


@pytest.mark.parametrize("form", FORMS)
def test_products(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 32 rows, so that one expert has rows in two, and others share one."""
    monkeypatch.setattr(tpu, "_CHUNK_ROWS", 32)
    kind, group, zeros, (outputs, depth) = FORMS[form]
    weight = quantized(kind, len(SIZES), 2, outputs, depth, group=group, zeros=zeros)
    x = jnp.asarray(RNG.standard_normal((48, depth), np.float32)).astype(jnp.bfloat16)
    got, ends = grouped(x, weight), np.cumsum(SIZES)
    numbers = np.asarray(weight.astype(jnp.float32))
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


def test_a_layer_equals_numpy() -> None:
    case = Case("", ((0, 2), (2, 1), (3, 2)), ffn=64, model=128, dtype="bfloat16", bias=True)
    x, ids, weights, experts = draw(case)
    gate_up, down = (encoded(w, "int8", 32, False) for w in (experts.gate_up, experts.down))
    few = dataclasses.replace(experts, gate_up=gate_up, down=down)
    want = oracle(case, x, ids, weights, few)
    np.testing.assert_allclose(
        run(case, x, ids, weights, few, KERNELS), want, rtol=2e-2, atol=2e-2 * np.abs(want).max()
    )


def test_one_size_gives_a_row_the_same_bits_among_any_others() -> None:
    weight = quantized("int8", len(SIZES), 1, 64, 128)
    x = jnp.asarray(RNG.standard_normal((512, 128), np.float32)).astype(jnp.bfloat16)
    kernels = TpuExperts(one_size=True, interpret=True)
    few, many = (grouped(x[:rows], weight, kernels, (0, 0, own, 0, 0)) for rows, own in ((128, 3), (512, 500)))
    np.testing.assert_array_equal(few[:, :3], many[:, :3])


def lowered(experts: ExpertWeights, dtype: Any = jnp.bfloat16, **options: Any) -> str:
    def layer(x: jax.Array, chosen: Chosen, experts: ExpertWeights) -> jax.Array:
        product = Products(experts="tpu", **options).of_experts(x.dtype, experts.gate_up, experts.down)
        return moe(x, chosen, experts, SWIGLU, product)

    x = jax.ShapeDtypeStruct((8, experts.down.shape[1]), dtype)
    chosen: Any = Chosen(*(jax.ShapeDtypeStruct((8, 2), each) for each in (jnp.int32, jnp.float32)))  # type: ignore
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
    wide = jax.ShapeDtypeStruct((16, 2048, 768), jnp.bfloat16)
    assert "tpu_custom_call" not in lowered(dataclasses.replace(few, down=wide))
