"""Qwen3-Next, Qwen3.5 and Qwen3.6: three of four layers are gated delta nets (https://arxiv.org/abs/2412.06464).

The fourth is attention whose heads have an output gate and rotate a quarter of their numbers. Norms have weight + 1,
but for the one behind the recurrence. Qwen3.5 publishes the parts of a projection apart and all experts as one tensor,
and has a tower for pictures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import Json, boolean, optional_integer, sparse_by_step
from jaxserve.models.config import ModelConfig, MoEConfig, MoENames, PredictorHead
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.draft_head import UNDER_MTP
from jaxserve.models.family import Family, Nested
from jaxserve.models.layers import (
    AttendFn,
    Attention,
    Cache,
    ConvTaps,
    HeadRows,
    Linear,
    RopeTable,
    StateInputs,
    over_rms,
)
from jaxserve.models.moe import feed_forward
from jaxserve.models.vision.read import qwen3_5
from jaxserve.models.weights import Part, param
from jaxserve.ops.linear import Products
from jaxserve.ops.state import StateSpec, StateWeights

_PREDICTOR = r"^mtp\."  # of several tokens at once
FLOAT32 = jnp.dtype(jnp.float32)


class GatedNorm(nnx.Module):
    """weight * x / rms(x) * activation(gate) over each head, in float32."""

    def __init__(self, size: int, eps: float, activation: Literal["silu", "sigmoid"] = "silu") -> None:
        self.weight = param((size,), (None,), FLOAT32, init="ones")
        self.eps, self.activation = eps, activation

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Norm x [T, H, V] by gate [T, H, V] -> [T, H, V] in gate's dtype."""
        y = over_rms(x, self.eps) * self.weight[...][None, None, :]
        activated = (jax.nn.silu if self.activation == "silu" else jax.nn.sigmoid)(gate.astype(jnp.float32))
        return (y * activated).astype(gate.dtype)


class GatedDeltaNet(nnx.Module):
    """A gated delta net: projections, the recurrence of `ops.state`, and a gated norm over each value head.

    in_proj [Hk, 2 K + 2 r V, D] has the rows of q, k, v and z of each key head, gates [Hk, 2 r, D] those of b and a, so
    a split over key heads splits all of it. What the checkpoint has, ModelConfig.delta_tensors says.
    """

    def __init__(self, config: ModelConfig, spec: StateSpec, dtype: jnp.dtype) -> None:
        self.spec, model, stored = spec, config.hidden_size, config.delta_tensors
        rows = spec.channels + spec.group * spec.v_dim
        projections = _projection_parts(spec, model, apart=stored != "joined")
        self.in_proj = HeadRows((spec.key_heads, rows, model), dtype, projections)
        gates = _gate_parts(spec, model, apart=stored == "apart")
        self.gates = HeadRows((spec.key_heads, spec.num_gates, model), dtype, gates)
        self.conv = ConvTaps(spec, dtype, _tap_parts(spec))
        self.A_log = param((spec.heads,), ("q_heads",), FLOAT32)
        self.dt_bias = param((spec.heads,), ("q_heads",), FLOAT32)
        self.norm = GatedNorm(spec.v_dim, config.norm_eps)
        self.out_proj = Linear((model, spec.heads * spec.v_dim), ("embed", "q_heads"), dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Run the layer on x [T, D], which needs no rotation -> (out [T, D], cache)."""
        y = self.in_proj(x, linear)
        qkv, z = y[:, :, : self.spec.channels], y[:, :, self.spec.channels :]
        raw = jnp.concatenate([qkv, self.gates(x, linear)], axis=-1)
        weights = StateWeights(self.conv.weight[...], log_a=self.A_log[...], dt_bias=self.dt_bias[...])
        out, cache = attend(StateInputs(raw, weights), cache)
        out = self.norm(out, z.reshape(out.shape))
        return self.out_proj(out.reshape(x.shape[0], -1), linear), cache


def _pieces(spec: StateSpec) -> tuple[tuple[int, int], ...]:
    """Return the rows of a key head's q, k and v: how many, and the first."""
    return (spec.k_dim, 0), (spec.k_dim, spec.k_dim), (spec.group * spec.v_dim, 2 * spec.k_dim)


def _tap_parts(spec: StateSpec) -> tuple[Part, ...]:
    """Return the parts of the taps, of which the checkpoint has all of q, then of k, then of v: [Hk channels, 1, W]."""
    parts, start, stored = [], 0, (spec.key_heads * spec.channels, 1, spec.conv_width)
    for channels, offset in _pieces(spec):
        rows, view = (start, start + spec.key_heads * channels), (spec.conv_width, spec.key_heads, channels)
        parts.append(Part("conv1d.weight", stored, view, (0, 0, offset), rows, transpose=(2, 1, 0)))
        start = rows[1]
    return tuple(parts)


def _projection_parts(spec: StateSpec, model: int, *, apart: bool) -> tuple[Part, ...]:
    heads, values = spec.key_heads, spec.group * spec.v_dim
    if not apart:
        rows = spec.channels + values
        return (Part("in_proj_qkvz.weight", (heads * rows, model), (heads, rows, model), (0, 0, 0)),)
    parts, start, shape = [], 0, (heads * spec.channels, model)
    for rows, offset in _pieces(spec):
        taken = start, start + heads * rows
        parts.append(Part("in_proj_qkv.weight", shape, (heads, rows, model), (0, offset, 0), taken))
        start = taken[1]
    z = Part("in_proj_z.weight", (heads * values, model), (heads, values, model), (0, spec.channels, 0))
    return (*parts, z)


def _gate_parts(spec: StateSpec, model: int, *, apart: bool) -> tuple[Part, ...]:
    heads, group = spec.key_heads, spec.group
    if not apart:
        return (Part("in_proj_ba.weight", (heads * 2 * group, model), (heads, 2 * group, model), (0, 0, 0)),)
    shape, view = (heads * group, model), (heads, group, model)
    return tuple(Part(f"in_proj_{name}.weight", shape, view, (0, i * group, 0)) for i, name in enumerate("ba"))


class Qwen3NextForCausalLM(CausalLM):
    """Pre-norm layers with a gated delta net or gated attention, and an MLP or experts."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        ffn, spec = feed_forward(config, index, dtype), config.layer_states[index]
        if spec is None:
            return PreNormLayer(config, dtype, Attention(config, dtype), ffn)
        return PreNormLayer(config, dtype, GatedDeltaNet(config, spec, dtype), ffn, mixer="linear_attn")


def _qwen3_next(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    sparse = sparse_by_step(hf, fields["num_layers"])
    moe = _experts(hf, sparse, num_experts=512, per_token=10)
    return _common(hf, fields) | {"moe": moe, "delta_tensors": "gates_joined" if hf.get("tensors_apart") else "joined"}


def _qwen3_5(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return _common(hf, fields)


def _qwen3_5_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    experts = _experts(hf, (True,) * fields["num_layers"], num_experts=256, per_token=8)
    return _common(hf, fields) | {"moe": replace(experts, normalize=True), "packed_experts": "rows"}


def _common(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    key_heads, heads = (optional_integer(hf, f"linear_num_{kind}_heads", n) for kind, n in (("key", 16), ("value", 32)))
    if heads % key_heads:
        raise ValueError(f"{heads} value heads are no multiple of {key_heads} key heads")
    state = StateSpec(
        "delta",
        key_heads,
        heads,
        optional_integer(hf, "linear_key_head_dim", 128),
        optional_integer(hf, "linear_value_head_dim", 128),
        optional_integer(hf, "linear_conv_kernel_dim", 4),
    )
    interval = optional_integer(hf, "full_attention_interval", 4)
    by_place = [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(fields["num_layers"])
    ]
    types = hf.get("layer_types") or by_place
    return {
        "qk_norm": "head",
        "norm_offset": 1.0,
        "output_gate": "queries",
        "delta_tensors": "apart",
        "layer_states": tuple(state if kind == "linear_attention" else None for kind in types),
        "ignored_tensors": (_PREDICTOR,),
        "predictor": PredictorHead(UNDER_MTP) if optional_integer(hf, "mtp_num_hidden_layers", 1) else None,
    }


def _experts(hf: Json, sparse: tuple[bool, ...], *, num_experts: int, per_token: int) -> MoEConfig:
    return MoEConfig(
        num_experts=optional_integer(hf, "num_experts", num_experts),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", per_token),
        ffn=optional_integer(hf, "moe_intermediate_size", 512),
        sparse_layers=sparse,
        normalize=boolean(hf, "norm_topk_prob", True),
        shared_ffn=optional_integer(hf, "shared_expert_intermediate_size", 512),
        shared_gate=True,
        names=MoENames(shared="shared_expert"),
    )


_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
_SUPPORTED = {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}
FAMILIES = (
    Family(
        "Qwen3NextForCausalLM",
        Qwen3NextForCausalLM,
        _qwen3_next,
        defaults=_DEFAULTS | {"intermediate_size": 5632},
        supported=_SUPPORTED,
    ),
    Family("Qwen3_5ForCausalLM", Qwen3NextForCausalLM, _qwen3_5, defaults=_DEFAULTS, supported=_SUPPORTED),
    Family(
        "Qwen3_5MoeForCausalLM",
        Qwen3NextForCausalLM,
        _qwen3_5_moe,
        defaults=_DEFAULTS | {"intermediate_size": 512},  # of no layer: all have experts
        supported=_SUPPORTED,
    ),
    Nested(("Qwen3_5ForConditionalGeneration",), {"qwen3_5_text": "Qwen3_5ForCausalLM"}, pictures=qwen3_5),
    Nested(("Qwen3_5MoeForConditionalGeneration",), {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, pictures=qwen3_5),
)
