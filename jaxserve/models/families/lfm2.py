"""LFM2 and LFM2-MoE (https://arxiv.org/abs/2511.23404): most layers are short convolutions, the others attention.

A convolution layer multiplies its input by a gate, convolves the last few tokens of each channel, and multiplies the
result by another gate. Nothing else is kept of the tokens before. Norms and projections have names of their own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import Json, boolean, number, optional_integer
from jaxserve.models.config import ModelConfig, MoEConfig, MoENames
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.family import Family
from jaxserve.models.layers import AttendFn, Attention, Cache, ConvTaps, HeadRows, Linear, RopeTable, StateInputs
from jaxserve.models.moe import feed_forward
from jaxserve.models.weights import Part
from jaxserve.ops.linear import Products
from jaxserve.ops.state import StateSpec, StateWeights


class ShortConvolution(nnx.Module):
    """out_proj(c * convolution(b * u)), where b, c and u are projections of a token: in_proj [Hk, 3 V, D]."""

    def __init__(self, config: ModelConfig, spec: StateSpec, dtype: jnp.dtype) -> None:
        self.spec, model = spec, config.hidden_size
        self.in_proj = HeadRows((spec.key_heads, 3 * spec.v_dim, model), dtype, _projection_parts(spec, model))
        taps = (spec.conv_width, spec.key_heads, spec.v_dim)
        stored = Part("conv.weight", (model, 1, spec.conv_width), taps, (0, 0, 0), transpose=(2, 1, 0))
        self.conv = ConvTaps(spec, dtype, (stored,))
        self.out_proj = Linear((model, model), ("embed", "q_heads"), dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Run the layer on x [T, D], which needs no rotation -> (out [T, D], cache)."""
        b, c, u = jnp.split(self.in_proj(x, linear), 3, axis=2)
        out, cache = attend(StateInputs(b * u, StateWeights(self.conv.weight[...])), cache)
        return self.out_proj((c * out).reshape(x.shape[0], -1), linear), cache


def _projection_parts(spec: StateSpec, model: int) -> tuple[Part, ...]:
    """Return the parts of in_proj, of which the checkpoint has all rows of b, then of c, then of u: [3 D, D]."""
    view, stored = (spec.key_heads, spec.v_dim, model), (3 * model, model)
    return tuple(
        Part("in_proj.weight", stored, view, (0, i * spec.v_dim, 0), (i * model, (i + 1) * model)) for i in range(3)
    )


class Lfm2ForCausalLM(CausalLM):
    """Pre-norm layers with a short convolution or attention, and an MLP or experts."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        ffn, spec = feed_forward(config, index, dtype), config.layer_states[index]
        if spec is None:
            return PreNormLayer(config, dtype, Attention(config, dtype), ffn)
        return PreNormLayer(config, dtype, ShortConvolution(config, spec, dtype), ffn, mixer="conv")


_NAMES = (
    ("model.embedding_norm.", "model.norm."),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".feed_forward.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def _common(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers, heads, model = fields["num_layers"], fields["num_heads"], fields["hidden_size"]
    full = hf.get("full_attn_idxs")
    by_place = ["full_attention" if full is None or i in full else "conv" for i in range(layers)]
    width = optional_integer(hf, "conv_L_cache", 3)
    state = StateSpec("convolution", heads, heads, 0, model // heads, width)
    return {
        "norm_eps": number(hf, "norm_eps", 1e-5),
        "tie_word_embeddings": boolean(hf, "tie_embedding", boolean(hf, "tie_word_embeddings", True)),
        "qkv_bias": False,
        "out_bias": False,
        "qk_norm": "head",
        "layer_states": tuple(state if kind == "conv" else None for kind in hf.get("layer_types") or by_place),
        "tensor_names": _NAMES,
    }


def _lfm2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    width = optional_integer(hf, "block_ff_dim", fields["intermediate_size"])
    if boolean(hf, "block_auto_adjust_ff_dim", True):
        width = 2 * width // 3
        factor = number(hf, "block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            unit = optional_integer(hf, "block_multiple_of", 256)
            width = -(-int(factor * width) // unit) * unit
    return _common(hf, fields) | {"intermediate_size": width}


def _lfm2_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    dense = optional_integer(hf, "num_dense_layers", 2)
    experts = MoEConfig(
        num_experts=optional_integer(hf, "num_experts", 32),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 4),
        ffn=optional_integer(hf, "moe_intermediate_size", 1792),
        sparse_layers=tuple(i >= dense for i in range(fields["num_layers"])),
        router="sigmoid",
        correction=boolean(hf, "use_expert_bias", True),
        normalize=boolean(hf, "norm_topk_prob", True),
        normalize_eps=1e-6,
        scale=number(hf, "routed_scaling_factor", 1.0),
        names=MoENames(correction="expert_bias"),
    )
    return _common(hf, fields) | {"moe": experts}


_SUPPORTED = {"conv_bias": (False,)}
FAMILIES = (
    Family("Lfm2ForCausalLM", Lfm2ForCausalLM, _lfm2, 1e6, {"intermediate_size": 12288}, supported=_SUPPORTED),
    Family("Lfm2MoeForCausalLM", Lfm2ForCausalLM, _lfm2_moe, 1e6, {"intermediate_size": 7168}, supported=_SUPPORTED),
)
