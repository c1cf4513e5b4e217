"""Kimi-Linear (https://arxiv.org/abs/2510.26692): Kimi Delta Attention, and latent attention without rotation.

Kimi Delta Attention is a gated delta net whose decay differs by channel, with one value head for each key head. The
experts are DeepSeek-V3's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import Json, optional_integer, shown
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.families.deepseek_v3 import LatentAttention, deepseek_v3
from jaxserve.models.families.qwen3_next import GatedNorm
from jaxserve.models.family import Family
from jaxserve.models.layers import AttendFn, Cache, ConvTaps, HeadRows, Linear, RopeTable, StateInputs
from jaxserve.models.moe import feed_forward
from jaxserve.models.weights import Part, param
from jaxserve.ops.linear import Products
from jaxserve.ops.state import StateSpec, StateWeights

_FLOAT32 = jnp.dtype(jnp.float32)


class DeltaAttention(nnx.Module):
    """Kimi Delta Attention: projections, the recurrence of `ops.state`, and a gated norm over each head.

    The decay and the output's gate are projections to one head's width and from there to all heads.
    """

    def __init__(self, config: ModelConfig, spec: StateSpec, dtype: jnp.dtype) -> None:
        heads, size, model = spec.heads, spec.k_dim, config.hidden_size
        self.spec = spec
        self.qkv_proj = _rows(spec, ("q_proj", "k_proj", "v_proj"), size, model, dtype)
        self.b_proj = _rows(spec, ("b_proj",), 1, model, dtype)
        self.f_a_proj = Linear((size, model), (None, "embed"), dtype)
        self.f_b_proj = _rows(spec, ("f_b_proj",), size, size, dtype)
        self.g_a_proj = Linear((size, model), (None, "embed"), dtype)
        self.g_b_proj = _rows(spec, ("g_b_proj",), size, size, dtype)
        self.conv1d = ConvTaps(spec, dtype, _tap_parts(spec))
        decay = Part("self_attn.A_log", (1, 1, heads, 1), (heads,), (0,), transpose=(2, 0, 1, 3))
        self.A_log = param((heads,), ("q_heads",), _FLOAT32, parts=(decay,))
        shift = Part("self_attn.dt_bias", (heads * size,), (heads, size), (0, 0))
        self.dt_bias = param((heads, size), ("q_heads", None), _FLOAT32, parts=(shift,))
        self.o_norm = GatedNorm(size, config.norm_eps, "sigmoid")
        self.o_proj = Linear((model, heads * size), ("embed", "q_heads"), dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Run the layer on x [T, D], which needs no rotation -> (out [T, D], cache)."""
        decay = self.f_b_proj(self.f_a_proj(x, linear), linear)
        gate = self.g_b_proj(self.g_a_proj(x, linear), linear)
        raw = jnp.concatenate([self.qkv_proj(x, linear), self.b_proj(x, linear), decay], axis=-1)
        weights = StateWeights(self.conv1d.weight[...], log_a=self.A_log[...], dt_bias=self.dt_bias[...])
        out, cache = attend(StateInputs(raw, weights), cache)
        out = self.o_norm(out, gate)
        return self.o_proj(out.reshape(x.shape[0], -1), linear), cache


def _tap_parts(spec: StateSpec) -> tuple[Part, ...]:
    """Return the parts of the taps: the convolutions of q, k and v, each [H K, 1, W]."""
    stored, view = (spec.heads * spec.k_dim, 1, spec.conv_width), (spec.conv_width, spec.heads, spec.k_dim)
    return tuple(
        Part(f"{name}_conv1d.weight", stored, view, (0, 0, i * spec.k_dim), transpose=(2, 1, 0))
        for i, name in enumerate("qkv")
    )


def _rows(spec: StateSpec, names: tuple[str, ...], size: int, inputs: int, dtype: jnp.dtype) -> HeadRows:
    """Make a projection of `inputs` to `size` rows of each head for each name, which is a tensor [H size, inputs]."""
    shape = (spec.heads, len(names) * size, inputs)
    stored, view = (spec.heads * size, inputs), (spec.heads, size, inputs)
    return HeadRows(
        shape, dtype, tuple(Part(f"{n}.weight", stored, view, (0, i * size, 0)) for i, n in enumerate(names))
    )


class KimiLinearForCausalLM(CausalLM):
    """Pre-norm layers with Kimi Delta Attention or latent attention, and an MLP or experts."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        spec = config.layer_states[index]
        assert config.latent is not None
        mixer = LatentAttention(config, config.latent, dtype) if spec is None else DeltaAttention(config, spec, dtype)
        return PreNormLayer(config, dtype, mixer, feed_forward(config, index, dtype))


# The names of DeepSeek-V3 for the keys of the same meaning.
_KEYS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "moe_router_activation_func": "scoring_func",
}
# transformers' own keys for those inside `linear_attn_config`, which counts if there is one
_OWN_KEYS = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def _kimi_linear(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers, linear = fields["num_layers"], hf.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        raise ValueError(f"'linear_attn_config' must be an object, not {shown(linear)}")
    given = {key: hf[name] for name, key in _OWN_KEYS.items() if name in hf} | linear
    heads, size = optional_integer(given, "num_heads", 32), optional_integer(given, "head_dim", 128)
    state = StateSpec("channel_delta", heads, heads, size, size, optional_integer(given, "short_conv_kernel_size", 4))
    keys = {name: hf[key] for key, name in _KEYS.items() if hf.get(key) is not None}
    return deepseek_v3({"first_k_dense_replace": 1, **hf, **keys}, fields) | {
        "rope_layers": (False,) * layers,
        "layer_states": tuple(state if each else None for each in _with_state(hf, linear, layers)),
        "tensor_names": _NAMES,
        "predictor": None,  # the form of a head that guesses tokens is not published
    }


def _with_state(hf: Json, linear: Json, layers: int) -> list[bool]:
    """Return which layers are Kimi Delta Attention. Raises ValueError if the lists do not name each layer once."""
    if (types := hf.get("layer_types")) is not None:
        return [kind == "linear_attention" for kind in types]
    delta, full = (linear.get(key) for key in ("kda_layers", "full_attn_layers"))
    if delta is None or full is None:
        return [index % 4 > 0 or index == 0 for index in range(layers)]
    if not isinstance(delta, list) or not isinstance(full, list) or sorted([*delta, *full]) != [*range(1, layers + 1)]:
        raise ValueError(f"'kda_layers' and 'full_attn_layers' must name each of {layers} layers once, the first as 1")
    return [index + 1 in delta for index in range(layers)]


_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
FAMILIES = (
    Family(
        "KimiLinearForCausalLM",
        KimiLinearForCausalLM,
        _kimi_linear,
        defaults=_DEFAULTS,
        supported={"mla_use_nope": (True,), "moe_layer_freq": (1,)},
    ),
)
