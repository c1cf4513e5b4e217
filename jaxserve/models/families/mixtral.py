"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral's attention, and experts instead of every MLP."""

from __future__ import annotations

from typing import Any

from jaxserve.models.checkpoint.read_config import Json, optional_integer, window_everywhere
from jaxserve.models.config import MoEConfig, MoENames
from jaxserve.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxserve.models.family import Family


def _mixtral(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    experts = MoEConfig(
        num_experts=optional_integer(hf, "num_local_experts", 8),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 2),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
        names=MoENames("block_sparse_moe", experts=("w1", "w3", "w2")),
    )
    return {"qkv_bias": False, "out_bias": False, "moe": experts, "layer_windows": window_everywhere(hf, fields)}


FAMILIES = (Family("MixtralForCausalLM", Qwen3MoeForCausalLM, _mixtral, rope_theta=1e6),)
