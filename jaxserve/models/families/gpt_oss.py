"""gpt-oss (https://arxiv.org/abs/2508.10925): attention sinks, alternating windows, biased experts, clamped SwiGLU."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import (
    Json,
    boolean,
    head_dim_or,
    integer,
    number,
    optional_integer,
    windows_but_every,
)
from jaxserve.models.config import ModelConfig, MoEConfig, MoENames
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.family import Family
from jaxserve.models.layers import Attention
from jaxserve.models.moe import feed_forward


class GptOssForCausalLM(CausalLM):
    """Pre-norm layers with attention sinks and a "topk_softmax" router."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), feed_forward(config, index, dtype))


def _gpt_oss(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    window = optional_integer(hf, "sliding_window", 128)
    experts = MoEConfig(
        num_experts=integer(hf, "num_local_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
        router="topk_softmax",
        router_bias=True,
        expert_bias=True,
        names=MoENames(router="router"),
    )
    quantized = (hf.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    bias = boolean(hf, "attention_bias", True)
    return head_dim_or(hf, 64) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "layer_windows": windows_but_every(hf, window, fields["num_layers"], 2),
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "activation_limit": number(hf, "swiglu_limit", 7.0),
        "moe": experts,
        "packed_experts": "mxfp4" if quantized else "bfloat16",
    }


FAMILIES = (Family("GptOssForCausalLM", GptOssForCausalLM, _gpt_oss, rope_theta=150000.0),)
