"""Mixture-of-experts feed-forward: router, experts, shared expert. ops/moe has the grouped matrix products.

Scores, choice and weights are float32 whatever the model's dtype: rounding could turn a near tie into another expert.
A router stores the ids of the chosen experts, and a caller may take them. If no caller does, they cost nothing, because
XLA removes values that a program does not return.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig, MoEConfig, PackedExperts
from jaxserve.models.layers import MLP, GatedActivation, Linear, PlainActivation, UngatedMLP
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


class ExpertRouter(KeepsChoices):
    """The router: weight [E, D], and a bias [E] or a correction of the choice [E] if the config's router has one."""

    def __init__(self, config: ModelConfig, moe_config: MoEConfig, dtype: jnp.dtype) -> None:
        count, names = moe_config.num_experts, moe_config.names
        self.moe = moe_config
        shape, kinds = (count, config.hidden_size), ("weight", "bias")
        weight, bias = (f"{names.router}.{kind}" for kind in kinds)
        self.weight = param(shape, (None, "embed"), dtype, parts=(Part(weight, shape, shape, (0, 0)),))
        self.bias = (
            param((count,), (None,), dtype, "zeros", (Part(bias, (count,), (count,), (0,)),))
            if moe_config.router_bias
            else None
        )
        stored, turned = ((1, count), (1, 0)) if names.correction_is_row else ((count,), None)
        parts = (Part(names.correction, stored, (count,), (0,), transpose=turned),)
        self.e_score_correction_bias = (
            param((count,), (None,), jnp.dtype(jnp.float32), "zeros", parts) if moe_config.correction else None
        )

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
        correction = None if self.e_score_correction_bias is None else self.e_score_correction_bias[...]
        return route(scores, correction, self.moe)


def route(scores: jax.Array, correction: jax.Array | None, config: MoEConfig) -> Chosen:
    """Choose experts by scores float32 [T, E], see MoEConfig. correction: float32 [E], which affects the choice only.

    Sigmoid, correction and groups are DeepSeek-V3's (https://arxiv.org/abs/2412.19437, section 2.1.2).
    """
    if config.soft_cap is not None:
        scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
    if config.router == "topk_softmax":
        top, ids = jax.lax.top_k(scores, config.experts_per_token)
        weights = jax.nn.softmax(top, axis=-1)
    else:
        weights, ids = _chosen(scores, correction, config)
        if config.normalize:
            total = weights.sum(axis=-1, keepdims=True)
            weights = weights / (total + config.normalize_eps if config.normalize_eps else total)
    return Chosen(ids, weights if config.scale == 1.0 else weights * config.scale)


def _chosen(scores: jax.Array, correction: jax.Array | None, config: MoEConfig) -> tuple[jax.Array, jax.Array]:
    """Return the gates float32 [T, K] and the ids int32 [T, K] of the chosen experts."""
    gates = jax.nn.sigmoid(scores) if config.router == "sigmoid" else jax.nn.softmax(scores, axis=-1)
    if correction is None and config.num_groups == 1:
        top, ids = jax.lax.top_k(gates, config.experts_per_token)
        return top, ids
    choice = gates if correction is None else gates + correction[None, :]
    _, ids = jax.lax.top_k(_within_best_groups(choice, config), config.experts_per_token)
    return jnp.take_along_axis(gates, ids, axis=-1), ids


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
    """gate_up_proj [E, F, 2, D] and down_proj [E, D, F]. Without a gate the first is [E, F, 1, D], of up alone.

    The checkpoint has, by ModelConfig.packed_experts:

    "none"      one tensor an expert and projection, each [out, in]
    "stacked"   one tensor a projection: gate, up [E, F, D], down [E, D, F]
    "rows"      gate_up_proj [E, 2F, D], the rows of gate before those of up, and down_proj [E, D, F]
    "columns"   gate_up_proj [E, D, 2F], the columns of gate before those of up, and down_proj [E, F, D]
    "bfloat16"  gate_up_proj [E, D, 2F], whose columns alternate between gate and up, and down_proj [E, F, D]
    "mxfp4"     gate_up_proj [E, 2F, D], whose rows alternate, and down_proj [E, D, F], in blocks of 4 bits
    """

    def __init__(self, config: ModelConfig, moe_config: MoEConfig, dtype: jnp.dtype) -> None:
        count, ffn, model = moe_config.num_experts, moe_config.ffn, moe_config.latent or config.hidden_size
        names, biased = moe_config.names.experts, moe_config.expert_bias
        self.weights_input = moe_config.weights_input
        self.gated = config.gated_mlp
        self.activation = (
            GatedActivation(config.activation, config.activation_limit)
            if self.gated
            else PlainActivation(config.activation)
        )
        inputs = names[:2] if self.gated else names[1:2]
        gate_up = _gate_up_parts(config.packed_experts, count, ffn, model, inputs)
        down = _down_parts(config.packed_experts, count, ffn, model, names[2])
        self.gate_up_proj = ExpertProj(
            param((count, ffn, len(inputs), model), ("expert", "expert_ffn", None, "embed"), dtype, parts=gate_up),
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
        product = linear.of_experts(x.dtype, experts.gate_up, experts.down, gated=self.gated)
        rows = _weighted_inputs(x, chosen) if self.weights_input else (x, chosen)
        out = moe(*rows, experts, self.activation, product, in_order=linear.in_order)
        return out.reshape(x.shape[0], -1, x.shape[1]).sum(axis=1) if self.weights_input else out


def _weighted_inputs(x: jax.Array, chosen: Chosen) -> tuple[jax.Array, Chosen]:
    """Return x [T, D] times each of its weights, [T * K, D], with one expert of weight 1 for each row."""
    rows = (x.astype(jnp.float32)[:, None, :] * chosen.weights[:, :, None]).astype(x.dtype)
    ids = chosen.ids.reshape(-1, 1)
    return rows.reshape(-1, x.shape[1]), Chosen(ids, jnp.ones(ids.shape, jnp.float32))


def _gate_up_parts(form: PackedExperts, count: int, ffn: int, model: int, names: tuple[str, ...]) -> tuple[Part, ...]:
    view, start = (count, ffn, 2, model), (0, 0, 0, 0)
    rows, columns = (count, 2 * ffn, model), (count, model, 2 * ffn)
    match form:
        case "none":
            return tuple(
                Part(f"{expert}.{name}.weight", (ffn, model), (1, ffn, 1, model), (expert, 0, i, 0))
                for expert in range(count)
                for i, name in enumerate(names)
            )
        case "stacked":
            one = (count, ffn, model)
            return tuple(
                Part(f".{name}.weight", one, (count, ffn, 1, model), (0, 0, i, 0)) for i, name in enumerate(names)
            )
        case "rows":
            split = (count, 2, ffn, model)
            return (Part("gate_up_proj", rows, view, start, split=split, transpose=(0, 2, 1, 3)),)
        case "columns":
            split = (count, model, 2, ffn)
            return (Part("gate_up_proj", columns, view, start, split=split, transpose=(0, 3, 2, 1)),)
        case "bfloat16":
            return (Part("gate_up_proj", columns, view, start, transpose=(0, 2, 1)),)
        case "mxfp4":
            return (Part("gate_up_proj", rows, view, start, mxfp4=True),)


def _down_parts(form: PackedExperts, count: int, ffn: int, model: int, name: str) -> tuple[Part, ...]:
    view, start = (count, model, ffn), (0, 0, 0)
    match form:
        case "none":
            one = (model, ffn)
            return tuple(Part(f"{e}.{name}.weight", one, (1, *one), (e, 0, 0)) for e in range(count))
        case "stacked":
            return (Part(f".{name}.weight", view, view, start),)
        case "rows":
            return (Part("down_proj", view, view, start),)
        case "columns" | "bfloat16":
            return (Part("down_proj", (count, ffn, model), view, start, transpose=(0, 2, 1)),)
        case "mxfp4":
            return (Part("down_proj", view, view, start, mxfp4=True),)


def _packed_bias(
    name: str, shape: tuple[int, ...], view: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype
) -> nnx.Param:
    return param(view, axes, dtype, "zeros", (Part(name, shape, view, (0,) * len(view)),))


class MoEBlock(nnx.Module):
    """The weighted sum of the chosen experts, plus the shared expert if there is one.

    Attributes have the checkpoint's names, see MoENames.
    """

    def __init__(self, config: ModelConfig, moe_config: MoEConfig, dtype: jnp.dtype) -> None:
        names = self.moe_names = moe_config.names
        self.has_shared, self.has_shared_gate = moe_config.shared_ffn > 0, moe_config.shared_gate
        self.is_latent = moe_config.latent > 0
        setattr(self, names.router.rpartition(".")[2], ExpertRouter(config, moe_config, dtype))
        self.experts = Experts(config, moe_config, dtype)
        if self.has_shared:
            setattr(self, names.shared, (MLP if config.gated_mlp else UngatedMLP)(config, dtype, moe_config.shared_ffn))
        if self.has_shared_gate:
            setattr(self, names.shared_gate, Linear((1, config.hidden_size), (None, "embed"), dtype))
        if self.is_latent:
            self.fc1_latent_proj = Linear((moe_config.latent, config.hidden_size), (None, "embed"), dtype)
            self.fc2_latent_proj = Linear((config.hidden_size, moe_config.latent), ("embed", None), dtype)

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        """Run the block: x [T, D] -> [T, D]."""
        names = self.moe_names
        chosen = getattr(self, names.router.rpartition(".")[2])(x)
        if self.is_latent:
            out = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x, linear), chosen, linear), linear)
        else:
            out = self.experts(x, chosen, linear)
        if not self.has_shared:
            return out
        shared = getattr(self, names.shared)(x, linear)
        if self.has_shared_gate:
            shared = jax.nn.sigmoid(getattr(self, names.shared_gate)(x, linear)) * shared
        return out + shared


def feed_forward(config: ModelConfig, index: int, dtype: jnp.dtype) -> MLP | UngatedMLP | MoEBlock:
    """Make the feed-forward of layer `index`: experts if the layer is sparse, else a dense MLP."""
    if config.moe is not None and config.moe.sparse_layers[index]:
        return MoEBlock(config, config.moe, dtype)
    return MLP(config, dtype) if config.gated_mlp else UngatedMLP(config, dtype)


def block_name(config: ModelConfig, index: int) -> str:
    """Return the checkpoint's name of the feed-forward of layer `index`."""
    return config.moe.names.block if config.moe is not None and config.moe.sparse_layers[index] else "mlp"
