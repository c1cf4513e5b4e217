"""Grouped experts against every token through every expert."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.quantization import encode
from jaxserve.ops import native
from jaxserve.ops.linear import Products
from jaxserve.ops.moe import Chosen, ExpertWeights, _grouped_ragged_dot, _grouped_tiles, _ragged_dot, moe
from jaxserve.ops.quantized import Quantized
from tests.ops.moe_reference import moe_reference


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def make_experts(count: int, ffn: int, model: int, bias: bool, seed: int = 0) -> ExpertWeights:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)

    return ExpertWeights(
        draw(count, ffn, 2, model),
        draw(count, model, ffn),
        draw(count, ffn, 2) if bias else None,
        draw(count, model) if bias else None,
    )


def without_gate(experts: ExpertWeights) -> ExpertWeights:
    assert isinstance(experts.gate_up, jax.Array)
    return dataclasses.replace(experts, gate_up=experts.gate_up[:, :, 1:], gate_up_bias=None)


def make_routing(tokens: int, choices: int, experts: int, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)])
    return jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random((tokens, choices)), jnp.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "choices", "count"), [(1, 1, 1), (1, 2, 8), (5, 2, 4), (40, 4, 16), (64, 2, 3)])
def test_equals_the_reference(tokens: int, choices: int, count: int, bias: bool) -> None:
    experts = make_experts(count, 12, 10, bias)
    ids, weights = make_routing(tokens, choices, count)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(tokens, 10)), jnp.float32)
    out = jax.jit(moe, static_argnums=3)(x, Chosen(ids, weights), experts, swiglu)
    assert jnp.allclose(out, moe_reference(x, ids, weights, experts, swiglu), atol=2e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_both_groupings_agree(bias: bool) -> None:
    experts = make_experts(6, 12, 10, bias)
    sizes = jnp.asarray([0, 9, 1, 0, 17, 3], jnp.int32)
    rows = jnp.asarray(np.random.default_rng(2).normal(size=(36, 10)), jnp.float32)  # 6 rows belong to nobody
    tiles = jax.jit(_grouped_tiles, static_argnums=3)(rows, sizes, experts, swiglu)
    ragged = jax.jit(_grouped_ragged_dot, static_argnums=3)(rows, sizes, experts, swiglu)
    assert jnp.allclose(tiles[:30], ragged[:30], atol=2e-5)
    assert not tiles[30:].any()


def test_all_tokens_on_one_expert_lose_nothing() -> None:
    experts = make_experts(4, 12, 10, False)
    ids = jnp.full((50, 1), 2, jnp.int32)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(50, 10)), jnp.float32)
    out = moe(x, Chosen(ids, jnp.ones((50, 1))), experts, swiglu)
    assert jnp.allclose(out, moe_reference(x, ids, jnp.ones((50, 1)), experts, swiglu), atol=2e-5)
    assert (jnp.abs(out).sum(axis=1) > 0).all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    experts = make_experts(8, 12, 10, True)
    ids, weights = make_routing(16, 2, 8)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(16, 10)), jnp.float32)
    run = jax.jit(moe, static_argnums=3)
    other = run(x.at[1:].set(0.5), Chosen(ids.at[1:].set(ids[0]), weights), experts, swiglu)
    assert jnp.array_equal(run(x, Chosen(ids, weights), experts, swiglu)[0], other[0])


@pytest.mark.parametrize("bias", [False, True])
def test_the_kernel_of_a_cpu_agrees(bias: bool) -> None:
    """Experts in float32 and int8. Another form is left to XLA."""
    try:
        native.load()
    except ConfigError as error:
        pytest.skip(str(error))
    experts = make_experts(6, 32, 64, bias)
    ids, weights = make_routing(20, 3, 6)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(20, 64)), jnp.float32)
    few = [Quantized(*map(jnp.asarray, encode(np.asarray(w), "int8", 32))) for w in (experts.gate_up, experts.down)]
    for form in (experts, dataclasses.replace(experts, gate_up=few[0], down=few[1])):
        product = Products(native=True).of_experts(x.dtype, form.gate_up, form.down)
        assert product is not None
        out = jax.jit(moe, static_argnums=(3, 4))(x, Chosen(ids, weights), form, swiglu, product)
        assert jnp.allclose(out, moe(x, Chosen(ids, weights), form, swiglu), atol=1e-3)
    assert Products(native=True).of_experts(x.dtype, experts.gate_up.astype(jnp.float16)) is None
    plain = without_gate(experts)
    product = Products(native=True).of_experts(x.dtype, plain.gate_up, plain.down, gated=False)
    assert product is not None
    out = jax.jit(moe, static_argnums=(3, 4))(x, Chosen(ids, weights), plain, relu2, product)
    assert jnp.allclose(out, moe(x, Chosen(ids, weights), plain, relu2), atol=1e-3)


def relu2(up: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(up))


def test_experts_without_a_gate_are_those_whose_gate_does_not_count() -> None:
    gated = make_experts(6, 32, 64, bias=False)
    plain = without_gate(gated)
    ids, weights = make_routing(20, 3, 6)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(20, 64)), jnp.float32)
    expected = moe_reference(x, ids, weights, gated, lambda gate, up: relu2(up))
    for each in (None, _ragged_dot):
        assert jnp.allclose(moe(x, Chosen(ids, weights), plain, relu2, each), expected, atol=1e-3)
    assert Products(experts="tpu").of_experts(x.dtype, gated=False) is None
    assert Products(experts="tpu").of_experts(jnp.bfloat16, gated=False) is None


def test_bfloat16_comes_back_as_bfloat16() -> None:
    experts = jax.tree.map(lambda w: w.astype(jnp.bfloat16), make_experts(4, 12, 10, False))
    ids, weights = make_routing(6, 2, 4)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(6, 10)), jnp.bfloat16)
    out = moe(x, Chosen(ids, weights), experts, swiglu)
    assert out.dtype == jnp.bfloat16
    expected = moe_reference(x, ids, weights, experts, swiglu)
    assert jnp.abs(out.astype(jnp.float32) - expected).max() < 0.02 * jnp.abs(expected).max() + 0.02
