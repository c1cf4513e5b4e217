"""MiniMax-M2, M2.5 and M2.7: partly rotated heads, norms over all query and all key heads, a sigmoid router."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.models.checkpoint.read_config import Json, optional_integer, rope_config
from jaxserve.models.config import MoEConfig, MoENames
from jaxserve.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxserve.models.family import Family

_NAMES = MoENames("block_sparse_moe", correction="e_score_correction_bias", experts=("w1", "w3", "w2"))


def _minimax_m2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    experts = MoEConfig(
        num_experts=optional_integer(hf, "num_local_experts", 256),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 8),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
        router="sigmoid",
        correction=True,
        names=_NAMES,
    )
    head_dim = optional_integer(hf, "head_dim", 128)
    rope = rope_config(hf, head_dim)
    rotated = optional_integer(hf, "rotary_dim", rope.rotary_dim)
    return {
        "head_dim": head_dim,
        "rope": dataclasses.replace(rope, rotary_dim=rotated),
        "qk_norm": "full",
        "moe": experts,
    }


FAMILIES = (
    Family(
        "MiniMaxM2ForCausalLM",
        Qwen3MoeForCausalLM,
        _minimax_m2,
        rope_theta=5e6,
        supported={
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0,),
            "attention_bias": (False,),
        },
    ),
)
