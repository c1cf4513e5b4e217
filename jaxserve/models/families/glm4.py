"""GLM-4 dense: half of each head is rotated, interleaved, and gate and up are one tensor.

The models of 2024 (`GlmForCausalLM`) are otherwise Llama. Those of 2025 (`Glm4ForCausalLM`) have norms on both sides of
each block, as in Gemma.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.models.checkpoint.read_config import Json, boolean
from jaxserve.models.families.gemma import GemmaForCausalLM
from jaxserve.models.families.llama import LlamaForCausalLM
from jaxserve.models.family import Family


def _glm(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope": dataclasses.replace(fields["rope"], interleaved=True),
        "qkv_bias": boolean(hf, "attention_bias", True),
        "out_bias": False,
        "mlp_bias": False,
        "packed_gate_up": True,
    }


def _glm4(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    names = (
        (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
        (".post_self_attn_layernorm.", ".post_attention_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
    )
    return _glm(hf, fields) | {"tensor_names": names}


FAMILIES = (
    Family("GlmForCausalLM", LlamaForCausalLM, _glm),
    Family("Glm4ForCausalLM", GemmaForCausalLM, _glm4),
)
