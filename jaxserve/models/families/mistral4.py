"""Ministral 3 and Mistral Small 4: queries scaled by position, in Mistral's layers and in DeepSeek-V3's.

Mistral Small 4 has a softmax router without a correction. Both are published inside `Mistral3ForConditionalGeneration`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.models.checkpoint.read_config import Json, head_dim_or, integer, number, window_everywhere
from jaxserve.models.families.deepseek_v3 import DeepseekV3ForCausalLM, deepseek_v3
from jaxserve.models.families.llama import LlamaForCausalLM
from jaxserve.models.family import Family, Nested
from jaxserve.models.rope import QueryScale, RopeConfig


def _scaled(hf: Json, rope: RopeConfig) -> RopeConfig:
    """Return the rotation with the scale of queries that its entry gives."""
    beta = number(hf["rope_parameters"], "llama_4_scaling_beta", None)
    if beta is None:
        return rope
    period = integer(hf["rope_parameters"], "original_max_position_embeddings")
    return dataclasses.replace(rope, query_scale=QueryScale(beta, period))


def _ministral3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    changes = head_dim_or(hf, 128)
    changes |= {"qkv_bias": False, "out_bias": False, "layer_windows": window_everywhere(hf, fields)}
    return changes | {"rope": _scaled(hf, changes["rope"])}


def _mistral4(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    # `partial_rotary_factor` is the part of a whole head that is rotated, which is all of `qk_rope_head_dim`
    rotation = {key: value for key, value in hf["rope_parameters"].items() if key != "partial_rotary_factor"}
    hf = {**hf, "rope_parameters": rotation, "first_k_dense_replace": hf.get("first_k_dense_replace") or 0}
    changes = deepseek_v3(hf, fields)
    experts = dataclasses.replace(changes["moe"], router="softmax", correction=False)
    own = {"predictor": None}  # the form of a head that guesses tokens is not published
    return changes | own | {"moe": experts, "packed_experts": "rows", "rope": _scaled(hf, changes["rope"])}


_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0}
_MINISTRAL3 = {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
_MISTRAL4 = {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
_SCALE = {"llama_4_scaling_beta": 0.1}

FAMILIES = (
    Family(
        "Ministral3ForCausalLM",
        LlamaForCausalLM,
        _ministral3,
        defaults={"rms_norm_eps": 1e-5, "rope_parameters": _YARN | _MINISTRAL3 | _SCALE},
    ),
    Family(
        "Mistral4ForCausalLM",
        DeepseekV3ForCausalLM,
        _mistral4,
        defaults={
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_parameters": _YARN | _MISTRAL4 | _SCALE,
        },
    ),
    Nested(
        ("Mistral3ForConditionalGeneration",),
        {
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
    ),
)
