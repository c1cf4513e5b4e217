"""Llama (https://arxiv.org/abs/2407.21783), and the families that differ from it only in their config.

Mistral (https://arxiv.org/abs/2310.06825): a sliding window.
Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): biases on q, k and v.
MiMo 7B (https://arxiv.org/abs/2505.07608): Qwen2, with a layer for multi-token prediction.
Qwen3, dense (https://arxiv.org/abs/2505.09388): an RMSNorm over each query and key head.
SmolLM3: every fourth layer has no positions. (SmolLM and SmolLM2 are Llama itself.)
Phi-3, Phi-3.5 and Phi-4-mini (https://arxiv.org/abs/2404.14219): packed tensors, partly rotated heads, LongRoPE.
Seed-OSS: biases on q, k and v, whose heads are wider than the hidden state.
ERNIE 4.5, dense: interleaved rotation, and one key for all biases.
InternLM3: its own names for the biases. (Falcon 3 is Llama itself.)
Helium: interleaved rotation.
Hunyuan, dense: norms over each query and key head after the rotation, whose base the config stretches.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import (
    Json,
    boolean,
    head_dim_or,
    integer,
    number,
    optional_integer,
    rope_config,
    window_everywhere,
    windows_by_type,
)
from jaxserve.models.config import ModelConfig, PredictorHead
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.family import Family, Nested
from jaxserve.models.layers import Attention
from jaxserve.models.moe import block_name, feed_forward
from jaxserve.models.vision.read import qwen2_5_vl, qwen3_vl


class LlamaForCausalLM(CausalLM):
    """Pre-norm layers with grouped-query attention, rotary positions and SwiGLU, or experts if the config has them."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        attention = Attention(config, dtype)
        return PreNormLayer(config, dtype, attention, feed_forward(config, index, dtype), block_name(config, index))


def _mistral(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": False,
        "out_bias": False,
        "layer_windows": window_everywhere({"sliding_window": 4096, **hf}, fields),
    }


def _phi3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"packed_qkv": True, "packed_gate_up": True, "layer_windows": window_everywhere(hf, fields)}


def _qwen2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "out_bias": False, "layer_windows": _qwen_windows(hf, fields)}


_MIMO_HEAD = (
    ("model.mtp_layers.0.token_layernorm.", "token_norm."),
    ("model.mtp_layers.0.hidden_layernorm.", "hidden_norm."),
    ("model.mtp_layers.0.input_proj.", "join."),
    ("model.mtp_layers.0.final_layernorm.", "norm."),
    ("model.mtp_layers.0.", "layer."),
)


def _mimo(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    found = {"ignored_tensors": (r"^model\.mtp_layers\.",)}
    head = optional_integer(hf, "num_nextn_predict_layers", 0) > 0
    return _qwen2(hf, fields) | found | ({"predictor": PredictorHead(_MIMO_HEAD, token_first=False)} if head else {})


def _qwen3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return head_dim_or(hf, 128) | {"qk_norm": "head", "layer_windows": _qwen_windows(hf, fields)}


def _qwen_windows(hf: Json, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the windows of Qwen: none unless `use_sliding_window`, and then none in the first `max_window_layers`."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window") is None:
        return ()
    full = optional_integer(hf, "max_window_layers", 28)
    window = integer(hf, "sliding_window")
    by_place = tuple(window if i >= full else None for i in range(fields["num_layers"]))
    return windows_by_type(hf, window) or by_place


def _smollm3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    interval = optional_integer(hf, "no_rope_layer_interval", 4)
    by_place = [(i + 1) % interval != 0 for i in range(fields["num_layers"])]
    rotated = tuple(bool(v) for v in hf.get("no_rope_layers") or by_place)  # despite its name, 1 is a layer with rope
    window = integer(hf, "sliding_window") if hf.get("use_sliding_window") and hf.get("sliding_window") else None
    windows = windows_by_type(hf, window) or tuple(None if r else window for r in rotated)
    return {
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", True),
        "rope_layers": rotated,
        "layer_windows": windows if window is not None else (),
    }


def _seed_oss(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    biases = {"qkv_bias": boolean(hf, "attention_bias", True), "out_bias": boolean(hf, "attention_out_bias", False)}
    return head_dim_or(hf, 128) | biases


def _ernie4_5(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    head_dim = optional_integer(hf, "head_dim", 128)
    return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), boolean(hf, "use_bias", False)) | {
        "head_dim": head_dim,
        "rope": dataclasses.replace(rope_config(hf, head_dim), interleaved=True),
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", True),
    }


def _internlm3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    if boolean(hf, "qkv_bias", False) != boolean(hf, "bias", False):
        raise ValueError("'qkv_bias' and 'bias' must be equal: other biases of InternLM3 are not supported")
    return head_dim_or(hf, 128) | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), boolean(hf, "bias", False))


def _helium(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"out_bias": False, "rope": dataclasses.replace(fields["rope"], interleaved=True)}


def _hunyuan(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    size, rope = fields["head_dim"], fields["rope"]
    stretched = rope.theta * number(hf["rope_parameters"], "alpha", 1.0) ** (size / (size - 2))
    return {
        "rope": dataclasses.replace(rope, theta=stretched),
        "qk_norm": "rotated_head",
        "mlp_bias": False,
        "tensor_names": ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm.")),
    }


FAMILIES = (
    Family("LlamaForCausalLM", LlamaForCausalLM),
    Family("MistralForCausalLM", LlamaForCausalLM, _mistral),
    Family("Phi3ForCausalLM", LlamaForCausalLM, _phi3),
    Family("Qwen2ForCausalLM", LlamaForCausalLM, _qwen2),
    Family("Qwen3ForCausalLM", LlamaForCausalLM, _qwen3),
    Family("MiMoForCausalLM", LlamaForCausalLM, _mimo, supported={"use_mrope": (False,), "attention_bias": (True,)}),
    Family("SmolLM3ForCausalLM", LlamaForCausalLM, _smollm3, rope_theta=2e6),
    Nested(("Qwen3VLForConditionalGeneration",), {"qwen3_vl_text": "Qwen3ForCausalLM"}, pictures=qwen3_vl),
    Nested(
        ("Qwen2_5_VLForConditionalGeneration",),
        dict.fromkeys(("qwen2_5_vl_text", "qwen2_5_vl"), "Qwen2ForCausalLM"),  # older files have no `text_config`
        pictures=qwen2_5_vl,
    ),
    Family("SeedOssForCausalLM", LlamaForCausalLM, _seed_oss),
    Family("Ernie4_5ForCausalLM", LlamaForCausalLM, _ernie4_5, rope_theta=500000.0),
    Family("InternLM3ForCausalLM", LlamaForCausalLM, _internlm3),
    Family("HeliumForCausalLM", LlamaForCausalLM, _helium, rope_theta=100000.0),
    Family("HunYuanDenseV1ForCausalLM", LlamaForCausalLM, _hunyuan),
)
