"""Granite 3 and 4 (https://arxiv.org/abs/2405.04324): Llama with scales on embeddings, scores, residuals and logits.

In Granite 4 most layers are Mamba-2, as in Bamba, and the attention of the others may have no positions. Its models
without states have the same name. A model without experts has the shared one alone, as its MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.models.checkpoint.read_config import Json, integer, number, optional_integer
from jaxserve.models.config import MoEConfig
from jaxserve.models.families.bamba import BambaForCausalLM, with_mamba2
from jaxserve.models.families.llama import LlamaForCausalLM
from jaxserve.models.family import Family
from jaxserve.models.tensor_names import Rules


def _granite(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the scales. Scores are multiplied by 1, not by head_dim ** -0.5, if the file has no scale."""
    return {
        "embed_scale": number(hf, "embedding_multiplier", 1.0),
        "attention_scale": number(hf, "attention_multiplier", 1.0),
        "residual_scale": number(hf, "residual_multiplier", 1.0),
        "logit_scale": 1.0 / number(hf, "logits_scaling", 1.0),
    }


def _granite_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    experts = MoEConfig(
        num_experts=optional_integer(hf, "num_local_experts", 8),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 2),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
        router="topk_softmax",
    )
    return _granite(hf, fields) | {
        "moe": experts,
        "packed_experts": "rows",
        "tensor_names": (
            (".block_sparse_moe.router.layer.", ".mlp.gate."),
            (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
            (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
        ),
    }


def _granite_hybrid(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    types, shared = hf.get("layer_types") or [], integer(hf, "shared_intermediate_size")
    states = [kind in ("mamba", "linear_attention") for kind in types] or [True] * fields["num_layers"]
    found = _granite(hf, fields) | {
        "intermediate_size": shared,
        "mlp_bias": False,
        "rope_layers": () if hf.get("position_embedding_type") == "rope" else (False,) * fields["num_layers"],
        "packed_gate_up": True,
    }
    if any(states):
        found |= with_mamba2(hf, fields, states)
    if not optional_integer(hf, "num_local_experts", 8):
        return found | {"tensor_names": _shared_mlp(".mlp.")}
    experts = _granite_moe(hf, fields)
    names = (*experts["tensor_names"], *_shared_mlp(".mlp.shared_experts."))
    return found | {
        "moe": replace(experts["moe"], shared_ffn=shared),
        "packed_experts": experts["packed_experts"],
        "tensor_names": names,
    }


def _shared_mlp(block: str) -> Rules:
    """Return the names of the MLP that each token runs through, which is `block` here."""
    return (
        (".shared_mlp.input_linear.", f"{block}gate_up_proj."),
        (".shared_mlp.output_linear.", f"{block}down_proj."),
    )


_HYBRID = {"shared_intermediate_size": 1024}

FAMILIES = (
    Family("GraniteForCausalLM", LlamaForCausalLM, _granite),
    Family("GraniteMoeForCausalLM", LlamaForCausalLM, _granite_moe),
    Family("GraniteMoeHybridForCausalLM", BambaForCausalLM, _granite_hybrid, defaults=_HYBRID),
)
