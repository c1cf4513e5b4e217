"""Hy3: Qwen3's attention, and a sigmoid router with names of its own."""

from __future__ import annotations

from typing import Any

from jaxserve.models.checkpoint.read_config import Json, head_dim_or, integer, number, optional_integer, sparse_layers
from jaxserve.models.config import MoEConfig, MoENames
from jaxserve.models.draft_head import of_deepseek
from jaxserve.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxserve.models.family import Family

_NAMES = MoENames(router="router.gate", correction="expert_bias", shared="shared_mlp")


def _hy_v3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers, ffn = fields["num_layers"], integer(hf, "moe_intermediate_size")
    experts = MoEConfig(
        num_experts=integer(hf, "num_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        ffn=ffn,
        sparse_layers=sparse_layers(hf, layers, 1),
        router="sigmoid",
        correction=True,
        normalize_eps=1e-20,
        scale=number(hf, "router_scaling_factor", 2.826),
        shared_ffn=ffn * optional_integer(hf, "num_shared_experts", 1),
        names=_NAMES,
    )
    # A layer for multi-token prediction comes after the model's own, also if the configuration does not mention it.
    count = optional_integer(hf, "num_nextn_predict_layers", 1)
    return head_dim_or(hf, 128) | {
        "qk_norm": "head",
        "moe": experts,
        "ignored_tensors": tuple(rf"^model\.layers\.{index}\." for index in range(layers, layers + max(1, count))),
        "predictor": of_deepseek(layers, "final_layernorm.", feeds_normed=True) if count else None,
    }


_DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}

FAMILIES = (Family("HYV3ForCausalLM", Qwen3MoeForCausalLM, _hy_v3, rope_theta=11_158_840.0, defaults=_DEFAULTS),)
