"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): Qwen3's attention, and experts in the layers that the config lists."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import Json, boolean, optional_integer, window_everywhere
from jaxserve.models.config import ModelConfig, MoEConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.family import Family
from jaxserve.models.layers import Attention
from jaxserve.models.moe import feed_forward


class Qwen3MoeForCausalLM(CausalLM):
    """Pre-norm layers with an RMSNorm per query and key head, and a softmax router."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), feed_forward(config, index, dtype))


def _qwen3_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    dense, step = set(hf.get("mlp_only_layers") or ()), optional_integer(hf, "decoder_sparse_step", 1)
    experts = MoEConfig(
        num_experts=optional_integer(hf, "num_experts", 128),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 8),
        ffn=optional_integer(hf, "moe_intermediate_size", 768),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(fields["num_layers"])),
        normalize=boolean(hf, "norm_topk_prob", False),
    )
    windows = window_everywhere(hf, fields) if hf.get("use_sliding_window") else ()
    return {"qk_norm": "head", "moe": experts, "layer_windows": windows}


FAMILIES = (Family("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM, _qwen3_moe),)
