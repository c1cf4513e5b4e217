"""GLM-4.5, 4.6 and 4.7 (https://arxiv.org/abs/2508.06471): partly rotated heads, DeepSeek-V3's router and experts."""

from __future__ import annotations

from typing import Any

from jaxserve.models.checkpoint.read_config import Json, boolean, predictors
from jaxserve.models.families.deepseek_v3 import deepseek_experts, deepseek_head
from jaxserve.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxserve.models.family import Family


def _glm4_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "out_bias": False,
        "qk_norm": "head" if boolean(hf, "use_qk_norm", False) else "none",
        "moe": deepseek_experts(hf, fields, dense=1),
        "ignored_tensors": predictors(hf, fields["num_layers"]),
        "predictor": deepseek_head(hf, fields["num_layers"]),
    }


_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
}

FAMILIES = (Family("Glm4MoeForCausalLM", Qwen3MoeForCausalLM, _glm4_moe, defaults=_DEFAULTS),)
