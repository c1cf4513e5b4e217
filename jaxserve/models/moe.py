"""Mixture-of-experts feed-forward: router, experts, shared expert. ops/moe has the grouped matrix products.

Scores, choice and weights are float32 whatever the model's dtype: rounding could turn a near tie into another expert.
A router stores the ids of the chosen experts, and a caller may take them. If no caller does, they cost nothing, because
XLA removes values that a program does not return.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig, MoEConfig
from jaxserve.models.layers import MLP, GatedActivation
from jaxserve.models.weights import Part, param
from jaxserve.ops.linear import Products
from jaxserve.ops.moe import Chosen, ExpertWeights, moe


class KeepsChoices(nnx.Module):
    """A module that chooses experts, or that contains modules that do."""

    choices: nnx.Intermediate

    def keep_choices(self, choices: jax.Array) -> None:
        """Store the chosen expert ids, int32 [T, K], or [T, L, K] for L layers. Replaces the stored ids."""
        self.choices = nnx.Intermediate(choices)


def take_choices(module: nnx.Module) -> jax.Array | None:
    """Remove and return the expert ids stored on a module or below it. None if there are none."""
    kept = jax.tree.leaves(nnx.pop(module, nnx.Intermediate))
    return kept[0] if kept else None


EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


class ExpertRouter(KeepsChoices):
    """The router: weight [E, D], and a bias [E] or a score correction [E] if the config's router has one."""

    def __init__(self, config: ModelConfig, moe_config: MoEConfig, dtype: jnp.dtype) -> None:
        count = moe_config.num_experts
        self.moe = moe_config
        self.weight = param((count, config.hidden_size), (None, "embed"), dtype)
        self.bias = param((count,), (None,), dtype, "zeros") if moe_config.router_bias else None
        sigmoid = moe_config.router == "sigmoid"
        self.e_score_correction_bias = param((count,), (None,), jnp.dtype(jnp.float32), "zeros") if sigmoid else None

    def __call__(self, x: jax.Array) -> Chosen:
        """Choose the experts of x [T, D]. Stores their ids, see `take_choices`."""
        chosen = self._route(x)
        self.keep_choices(chosen.ids)
        return chosen

    def _route(self, x: jax.Array) -> Chosen:
        weight = self.weight[...].astype(jnp.float32)
        scores = jax.lax.dot_general(x.astype(jnp.float32), weight, (((1,), (1,)), ((), ())))
        if self.bias is not None:
            scores = scores + self.bias[...].astype(jnp.float32)[None, :]
        if self.e_score_correction_bias is not None:
            return route_sigmoid(scores, self.e_score_correction_bias[...], self.moe)
        return route_softmax(scores, self.moe)


def route_softmax(scores: jax.Array, config: MoEConfig) -> Chosen:
    """Choose experts by softmax of scores float32 [T, E]. See MoEConfig.router."""
    if config.router == "topk_softmax":
        top, ids = jax.lax.top_k(scores, config.experts_per_token)
        return Chosen(ids, jax.nn.softmax(top, axis=-1))
    weights, ids = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), config.experts_per_token)
    return Chosen(ids, weights / weights.sum(axis=-1, keepdims=True) if config.normalize else weights)


def route_sigmoid(scores: jax.Array, correction: jax.Array, config: MoEConfig) -> Chosen:
    """Choose experts by sigmoid, as DeepSeek-V3 does (https://arxiv.org/abs/2412.19437, section 2.1.2).

    scores: float32 [T, E]. correction: float32 [E], which affects the choice and not the weights.
    """
    gates = jax.nn.sigmoid(scores)
    choice = _within_best_groups(gates + correction[None, :], config)
    _, ids = jax.lax.top_k(choice, config.experts_per_token)
    weights = jnp.take_along_axis(gates, ids, axis=-1)
    if config.normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return Chosen(ids, weights * config.scale)


def _within_best_groups(choice: jax.Array, config: MoEConfig) -> jax.Array:
    """Return choice [T, E] with the experts outside the best groups set to -inf."""
    if config.num_groups == 1:
        return choice
    groups = choice.reshape(choice.shape[0], config.num_groups, -1)
    merit = jax.lax.top_k(groups, 2)[0].sum(axis=-1)
    _, best = jax.lax.top_k(merit, config.topk_groups)
    kept = jax.nn.one_hot(best, config.num_groups, dtype=jnp.bool_).any(axis=1)
    return jnp.where(kept[:, :, None], groups, -jnp.inf).reshape(choice.shape)


class ExpertProj(nnx.Module):
    """One projection of all experts: a weight, and a bias if the family has one."""

    def __init__(self, weight: nnx.Param, bias: nnx.Param | None) -> None:
        self.weight = weight
        self.bias = bias


class Experts(nnx.Module):
    """gate_up_proj [E, F, 2, D] and down_proj [E, D, F]. The checkpoint has one tensor per expert, or packed ones."""

    def __init__(
        self,
        config: ModelConfig,
        moe_config: MoEConfig,
        dtype: jnp.dtype,
        names: tuple[str, str, str] = EXPERT_NAMES,
    ) -> None:
        count, ffn, model = moe_config.num_experts, moe_config.ffn, config.hidden_size
        self.activation = GatedActivation(config.activation, config.activation_limit)
        packed = config.packed_experts
        biased = packed != "none"
        if packed == "none":
            gate_up, down = _gate_up_parts(count, ffn, model, names), _down_parts(count, ffn, model, names[2])
        else:
            gate_up, down = _packed_gate_up(count, ffn, model, packed), _packed_down(count, ffn, model, packed)
        self.gate_up_proj = ExpertProj(
            param((count, ffn, 2, model), ("expert", "expert_ffn", None, "embed"), dtype, parts=gate_up),
            _packed_bias("gate_up_proj_bias", (count, 2 * ffn), (count, ffn, 2), ("expert", "expert_ffn", None), dtype)
            if biased
            else None,
        )
        self.down_proj = ExpertProj(
            param((count, model, ffn), ("expert", "embed", "expert_ffn"), dtype, parts=down),
            _packed_bias("down_proj_bias", (count, model), (count, model), ("expert", "embed"), dtype)
            if biased
            else None,
        )

    def __call__(self, x: jax.Array, chosen: Chosen, linear: Products) -> jax.Array:
        """Run x [T, D] through the chosen experts -> [T, D]."""
        gate_up, down = self.gate_up_proj, self.down_proj
        experts = ExpertWeights(
            gate_up.weight[...],
            down.weight[...],
            None if gate_up.bias is None else gate_up.bias[...],
            None if down.bias is None else down.bias[...],
        )
        product = linear.of_experts(x.dtype, experts.gate_up, experts.down)
        return moe(x, chosen, experts, self.activation, product, in_order=linear.in_order)


def _gate_up_parts(count: int, ffn: int, model: int, names: tuple[str, str, str]) -> tuple[Part, ...]:
    return tuple(
        Part(f"{expert}.{name}.weight", (ffn, model), (1, ffn, 1, model), (expert, 0, i, 0))
        for expert in range(count)
        for i, name in enumerate(names[:2])
    )


def _down_parts(count: int, ffn: int, model: int, name: str) -> tuple[Part, ...]:
    shape = (model, ffn)
    return tuple(Part(f"{e}.{name}.weight", shape, (1, *shape), (e, 0, 0)) for e in range(count))


def _packed_gate_up(count: int, ffn: int, model: int, form: str) -> tuple[Part, ...]:
    """Describe gpt-oss's tensor, in which gate and up alternate: MXFP4 has [E, 2F, D], bfloat16 [E, D, 2F]."""
    view, start = (count, ffn, 2, model), (0, 0, 0, 0)
    if form == "mxfp4":
        return (Part("gate_up_proj", (count, 2 * ffn, model), view, start, mxfp4=True),)
    return (Part("gate_up_proj", (count, model, 2 * ffn), view, start, transpose=(0, 2, 1)),)


def _packed_down(count: int, ffn: int, model: int, form: str) -> tuple[Part, ...]:
    view, start = (count, model, ffn), (0, 0, 0)
    if form == "mxfp4":
        return (Part("down_proj", view, view, start, mxfp4=True),)
    return (Part("down_proj", (count, ffn, model), view, start, transpose=(0, 2, 1)),)


def _packed_bias(
    name: str, shape: tuple[int, ...], view: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype
) -> nnx.Param:
    return param(view, axes, dtype, "zeros", (Part(name, shape, view, (0,) * len(view)),))


class MoEBlock(nnx.Module):
    """The weighted sum of the chosen experts, plus the shared expert if there is one. Names of most checkpoints."""

    def __init__(self, config: ModelConfig, moe_config: MoEConfig, dtype: jnp.dtype) -> None:
        self.gate = ExpertRouter(config, moe_config, dtype)
        self.experts = Experts(config, moe_config, dtype)
        self.shared_experts = MLP(config, dtype, moe_config.shared_ffn) if moe_config.shared_ffn else None

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        """Run the block: x [T, D] -> [T, D]."""
        out = self.experts(x, self.gate(x), linear)
        return out if self.shared_experts is None else out + self.shared_experts(x, linear)


def feed_forward(config: ModelConfig, index: int, dtype: jnp.dtype) -> MLP | MoEBlock:
    """Make the feed-forward of layer `index`: experts if the layer is sparse, else a dense MLP."""
    if config.moe is not None and config.moe.sparse_layers[index]:
        return MoEBlock(config, config.moe, dtype)
    return MLP(config, dtype)
