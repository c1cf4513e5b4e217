"""What each family's config.json means beyond the common keys: features, unwritten defaults, names of its own.

A function a family: (the parsed JSON, the fields read so far) -> the ModelConfig fields that are added or replaced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxserve.models.config import LatentConfig, MoEConfig
from jaxserve.models.families.hf_keys import Json, boolean, integer, number, optional_integer, rope_config
from jaxserve.models.rope import RopeConfig

Changes = Callable[[Json, dict[str, Any]], dict[str, Any]]


def no_changes(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {}


def _bert(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    if hf.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"position_embedding_type {hf['position_embedding_type']!r} is not supported")
    return {
        "norm_eps": number(hf, "layer_norm_eps", 1e-12),
        "bidirectional": True,
        "type_vocab_size": optional_integer(hf, "type_vocab_size", 2),
        "ignored_tensors": (r"^pooler\.", r"position_ids$"),
    }


def _mistral(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": False,
        "out_bias": False,
        "layer_windows": _window_everywhere({"sliding_window": 4096, **hf}, fields),
    }


def _mixtral(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    experts = MoEConfig(
        num_experts=optional_integer(hf, "num_local_experts", 8),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 2),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
    )
    return {"qkv_bias": False, "out_bias": False, "moe": experts, "layer_windows": _window_everywhere(hf, fields)}


def _qwen2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "out_bias": False, "layer_windows": _qwen_windows(hf, fields)}


def _qwen3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return _head_dim(hf, 128) | {"qk_norm": "head", "layer_windows": _qwen_windows(hf, fields)}


def _qwen3_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    dense, step = set(hf.get("mlp_only_layers") or ()), optional_integer(hf, "decoder_sparse_step", 1)
    experts = MoEConfig(
        num_experts=optional_integer(hf, "num_experts", 128),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 8),
        ffn=optional_integer(hf, "moe_intermediate_size", 768),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(fields["num_layers"])),
        normalize=boolean(hf, "norm_topk_prob", False),
    )
    windows = _window_everywhere(hf, fields) if hf.get("use_sliding_window") else ()
    return {"qk_norm": "head", "moe": experts, "layer_windows": windows}


def _gemma(hf: Json, fields: dict[str, Any], pattern: int) -> dict[str, Any]:
    """Every `pattern`-th layer is full, the others have the window."""
    window = optional_integer(hf, "sliding_window", optional_integer(hf, "sliding_window_attention_size", 4096))
    by_place = tuple(window if (i + 1) % pattern else None for i in range(fields["num_layers"]))
    return _head_dim(hf, 256) | {
        "activation": "gelu_tanh",
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", True),
        "norm_offset": 1.0,
        "embed_scale": fields["hidden_size"] ** 0.5,
        "attention_scale": number(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        "layer_windows": _windows_by_type(hf, window) or by_place,
    }


def _gemma2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    caps = {"attention_soft_cap": "attn_logit_softcapping", "logit_soft_cap": "final_logit_softcapping"}
    defaults = {"attention_soft_cap": 50.0, "logit_soft_cap": 30.0}
    return _gemma(hf, fields, 2) | {
        name: number(hf, key, None if key in hf else defaults[name]) for name, key in caps.items()
    }


def _gemma3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    if hf.get("use_bidirectional_attention"):
        raise ValueError("'use_bidirectional_attention' is not supported")
    changes = _gemma(hf, fields, optional_integer(hf, "sliding_window_pattern", 6))
    rope, local = _ropes_by_layer_type(hf, changes["head_dim"])
    local = local or RopeConfig(changes["head_dim"], number(hf, "rope_local_base_freq", 10000.0))
    return changes | {"qk_norm": "head", "rope": rope, "local_rope": local}


def _phi3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"packed_projections": True, "layer_windows": _window_everywhere(hf, fields)}


def _olmo2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"qk_norm": "full"}


def _olmo3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer is full; scaling of the rotation is for the full layers only."""
    window = optional_integer(hf, "sliding_window", 4096)
    by_place = tuple(window if (i + 1) % 4 else None for i in range(fields["num_layers"]))
    rope, local = _ropes_by_layer_type(hf, fields["head_dim"])
    return {
        "qk_norm": "full",
        "layer_windows": _windows_by_type(hf, window) or by_place,
        "rope": rope,
        "local_rope": local or dataclasses.replace(rope, scaling=None),
    }


def _ropes_by_layer_type(hf: Json, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Of the full layers, and of those with a window where the file states it."""
    if not rope_by_layer_type(hf):
        return rope_config(hf, head_dim), None
    by_type = hf["rope_parameters"]
    return rope_config(hf, head_dim, by_type["full_attention"]), rope_config(hf, head_dim, by_type["sliding_attention"])


def _smollm3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    interval = optional_integer(hf, "no_rope_layer_interval", 4)
    by_place = [(i + 1) % interval != 0 for i in range(fields["num_layers"])]
    rotated = tuple(bool(v) for v in hf.get("no_rope_layers") or by_place)  # despite its name, 1 is a layer with rope
    window = integer(hf, "sliding_window") if hf.get("use_sliding_window") and hf.get("sliding_window") else None
    windows = _windows_by_type(hf, window) or tuple(None if r else window for r in rotated)
    return {
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", True),
        "rope_layers": rotated,
        "layer_windows": windows if window is not None else (),
    }


def _gpt_oss(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    window = optional_integer(hf, "sliding_window", 128)
    by_place = tuple(window if (i + 1) % 2 else None for i in range(fields["num_layers"]))
    experts = MoEConfig(
        num_experts=integer(hf, "num_local_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
        router="topk_softmax",
        router_bias=True,
    )
    quantized = (hf.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    bias = boolean(hf, "attention_bias", True)
    return _head_dim(hf, 64) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "layer_windows": _windows_by_type(hf, window) or by_place,
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "activation_limit": number(hf, "swiglu_limit", 7.0),
        "moe": experts,
        "packed_experts": "mxfp4" if quantized else "bfloat16",
    }


def _deepseek_v3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers, ffn = fields["num_layers"], optional_integer(hf, "moe_intermediate_size", 2048)
    latent = LatentConfig(
        kv_rank=integer(hf, "kv_lora_rank"),
        q_rank=optional_integer(hf, "q_lora_rank", None),
        nope_dim=integer(hf, "qk_nope_head_dim"),
        rope_dim=integer(hf, "qk_rope_head_dim"),
        v_dim=integer(hf, "v_head_dim"),
    )
    experts = MoEConfig(
        num_experts=integer(hf, "n_routed_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        ffn=ffn,
        sparse_layers=tuple(i >= optional_integer(hf, "first_k_dense_replace", 3) for i in range(layers)),
        router="sigmoid",
        normalize=boolean(hf, "norm_topk_prob", True),
        num_groups=optional_integer(hf, "n_group", 1),
        topk_groups=optional_integer(hf, "topk_group", 1),
        scale=number(hf, "routed_scaling_factor", 1.0),
        shared_ffn=ffn * optional_integer(hf, "n_shared_experts", 0),
    )
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or hf.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError("only the router of DeepSeek-V3 is supported: sigmoid scores, topk_method noaux_tc")
    rope = dataclasses.replace(rope_config(hf, latent.rope_dim), interleaved=boolean(hf, "rope_interleave", True))
    predictors = range(layers, layers + optional_integer(hf, "num_nextn_predict_layers", 0))
    return {
        "head_dim": latent.nope_dim + latent.rope_dim,
        "rope": rope,
        "latent": latent,
        "attention_scale": (latent.nope_dim + latent.rope_dim) ** -0.5 * _yarn_score_factor(hf),
        "moe": experts,
        # layers that predict further tokens stand behind the model's own
        "ignored_tensors": tuple(rf"^model\.layers\.{i}\." for i in predictors),
    }


def _yarn_score_factor(hf: Json) -> float:
    """DeepSeek's YaRN scales the scores by the square of its mscale_all_dim."""
    p = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    weight, factor = number(p, "mscale_all_dim", 0.0), number(p, "factor", 1.0)
    return 1.0 if not weight or factor <= 1 else (0.1 * weight * math.log(factor) + 1.0) ** 2


def _head_dim(hf: Json, default: int) -> dict[str, Any]:
    """For families whose heads are not hidden over heads wide where nothing is said; the rotation goes with them."""
    head_dim = optional_integer(hf, "head_dim", default)
    return {"head_dim": head_dim, "rope": rope_config(hf, head_dim) if not rope_by_layer_type(hf) else None}


def rope_by_layer_type(hf: Json) -> bool:
    return "full_attention" in (hf.get("rope_parameters") or {})


def _qwen_windows(hf: Json, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's window is off unless asked for, and then leaves the first `max_window_layers` layers full."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window") is None:
        return ()
    full = optional_integer(hf, "max_window_layers", 28)
    window = integer(hf, "sliding_window")
    by_place = tuple(window if i >= full else None for i in range(fields["num_layers"]))
    return _windows_by_type(hf, window) or by_place


def _window_everywhere(hf: Json, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """The same window in each layer; none where it is absent or no shorter than the context."""
    window = optional_integer(hf, "sliding_window", None)
    if window is None or window >= fields["max_position_embeddings"]:
        return ()
    return (window,) * fields["num_layers"]


def _windows_by_type(hf: Json, window: int | None) -> tuple[int | None, ...]:
    types = hf.get("layer_types") or ()
    return tuple(window if t == "sliding_attention" else None for t in types)


FAMILIES: dict[str, Changes] = {
    "BertModel": _bert,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SmolLM3ForCausalLM": _smollm3,
}
