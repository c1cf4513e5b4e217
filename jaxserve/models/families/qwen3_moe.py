"""Families with an attention and a router that others have too.

Qwen3-MoE (https://arxiv.org/abs/2505.09388): Qwen3's attention, and experts in the layers that the config lists.
Qwen2-MoE (https://arxiv.org/abs/2407.10671): biases on q, k and v, and a shared expert with a gate.
OLMoE (https://arxiv.org/abs/2409.02060): norms over all query and all key heads at once.
ERNIE 4.5 MoE: interleaved rotation, and a router with softmax and a correction of the choice.
dots.llm1 (https://arxiv.org/abs/2506.05767): Qwen3's attention and DeepSeek-V3's router.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import (
    Json,
    boolean,
    integer,
    optional_integer,
    sparse_by_step,
    window_everywhere,
    windows_by_type,
)
from jaxserve.models.config import ModelConfig, MoEConfig, MoENames, PredictorHead
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.families.deepseek_v3 import deepseek_experts
from jaxserve.models.family import Family, Nested
from jaxserve.models.layers import Attention
from jaxserve.models.moe import block_name, feed_forward
from jaxserve.models.vision.read import qwen3_vl


class Qwen3MoeForCausalLM(CausalLM):
    """Pre-norm layers with grouped-query attention, and experts in the sparse ones."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        attention = Attention(config.at(index), dtype)
        return PreNormLayer(config, dtype, attention, feed_forward(config, index, dtype), block_name(config, index))


def _qwen_experts(hf: Json, fields: dict[str, Any]) -> MoEConfig:
    return MoEConfig(
        num_experts=optional_integer(hf, "num_experts", 128),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 8),
        ffn=optional_integer(hf, "moe_intermediate_size", 768),
        sparse_layers=sparse_by_step(hf, fields["num_layers"]),
        normalize=boolean(hf, "norm_topk_prob", False),
    )


def _qwen3_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    windows = window_everywhere(hf, fields) if hf.get("use_sliding_window") else ()
    return {"qk_norm": "head", "moe": _qwen_experts(hf, fields), "layer_windows": windows}


def _qwen2_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    experts = dataclasses.replace(
        _qwen_experts(hf, fields),
        shared_ffn=integer(hf, "shared_expert_intermediate_size"),
        shared_gate=True,
        names=MoENames(shared="shared_expert"),
    )
    changes = {"qkv_bias": boolean(hf, "qkv_bias", True), "out_bias": False, "mlp_bias": False, "moe": experts}
    if not hf.get("use_sliding_window") or hf.get("sliding_window") is None:
        return changes
    window, last = integer(hf, "sliding_window"), optional_integer(hf, "max_window_layers", 28)
    by_place = tuple(window if i % 2 == 0 and i < last else None for i in range(fields["num_layers"]))
    return changes | {"layer_windows": windows_by_type(hf, window) or by_place}


def _olmoe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    if hf.get("clip_qkv") is not None:
        raise ValueError("'clip_qkv' is not supported")
    experts = MoEConfig(
        num_experts=integer(hf, "num_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
        normalize=boolean(hf, "norm_topk_prob", False),
    )
    return {"qk_norm": "full", "mlp_bias": False, "moe": experts}


def _ernie4_5_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers, ffn = fields["num_layers"], integer(hf, "moe_intermediate_size")
    first, last = optional_integer(hf, "moe_layer_start_index", 1), optional_integer(hf, "moe_layer_end_index", -1)
    last, step = layers - 1 if last == -1 else last, optional_integer(hf, "moe_layer_interval", 1)
    experts = MoEConfig(
        num_experts=integer(hf, "moe_num_experts"),
        experts_per_token=integer(hf, "moe_k"),
        ffn=ffn,
        sparse_layers=tuple(first <= i <= last and (i + 1) % step == 0 for i in range(layers)),
        correction=True,
        shared_ffn=ffn * optional_integer(hf, "moe_num_shared_experts", 2),
        names=MoENames(correction="moe_statics.e_score_correction_bias", correction_is_row=True),
    )
    return {
        "rope": dataclasses.replace(fields["rope"], interleaved=True),
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", True),
        "moe": experts,
        "ignored_tensors": (r"^model\.mtp_",),  # for multi-token prediction
        "predictor": _ernie_head(layers) if optional_integer(hf, "num_nextn_predict_layers", 0) else None,
    }


def _ernie_head(layers: int) -> PredictorHead:
    """Return the head as ERNIE's training code has it. Its layer has an MLP.

    It reads the hidden states before the final norm, and that norm is its last one too. vLLM and SGLang read those
    after the norm.
    """
    return PredictorHead(_ERNIE_HEAD, taps=(layers,), feeds_normed=False, sparse=False, own_norm=False)


def _dots1(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    window, first = optional_integer(hf, "sliding_window", None), optional_integer(hf, "max_window_layers", 62)
    by_place = tuple(window if i >= first else None for i in range(fields["num_layers"]))
    windows = windows_by_type(hf, window) or by_place
    return {
        "qk_norm": "head",
        "moe": deepseek_experts(hf, fields, dense=0),
        "layer_windows": windows if any(windows) else (),
    }


_ERNIE_HEAD = (
    ("model.mtp_emb_norm.0.", "token_norm."),
    ("model.mtp_hidden_norm.0.", "hidden_norm."),
    ("model.mtp_linear_proj.0.", "join."),
    ("model.mtp_block.0.", "layer."),
)
_QWEN2 = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 4096,
}
_OLMOE = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
_ERNIE = {"rms_norm_eps": 1e-5, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}
_DOTS = {"norm_topk_prob": False, "moe_intermediate_size": 1408}

FAMILIES = (
    Family("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM, _qwen3_moe),
    Family("Qwen2MoeForCausalLM", Qwen3MoeForCausalLM, _qwen2_moe, defaults=_QWEN2),
    Family("OlmoeForCausalLM", Qwen3MoeForCausalLM, _olmoe, defaults=_OLMOE),
    Family("Ernie4_5_MoeForCausalLM", Qwen3MoeForCausalLM, _ernie4_5_moe, rope_theta=500000.0, defaults=_ERNIE),
    Family("Dots1ForCausalLM", Qwen3MoeForCausalLM, _dots1, defaults=_DOTS),
    Nested(("Qwen3VLMoeForConditionalGeneration",), {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}, pictures=qwen3_vl),
)
