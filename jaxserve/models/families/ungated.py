"""Families with an MLP without a gate: two projections and the activation between them.

Nemotron 4 and Minitron (https://arxiv.org/abs/2407.14679): squared ReLU, half of each head rotated, LayerNorm with
weights around zero.
Arcee AFM: squared ReLU in Llama.
Apertus (https://arxiv.org/abs/2509.14233): xIELU with learned numbers, norms over each query and key head.
StarCoder2 (https://arxiv.org/abs/2402.19173): GELU, LayerNorm, biases everywhere, a sliding window.
"""

from __future__ import annotations

from typing import Any

from jaxserve.models.checkpoint.read_config import (
    Json,
    boolean,
    number,
    optional_integer,
    window_everywhere,
)
from jaxserve.models.families.llama import LlamaForCausalLM
from jaxserve.models.family import Family


def _nemotron(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "gated_mlp": False,
        "norm": "layer",
        "norm_bias": True,
        "norm_offset": 1.0,
        "norm_eps": number(hf, "norm_eps", 1e-5),
    }


def _arcee(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"gated_mlp": False}


def _apertus(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "gated_mlp": False,
        "mlp_bias": False,
        "qk_norm": "head",
        "tensor_names": (
            (".attention_layernorm.", ".input_layernorm."),
            (".feedforward_layernorm.", ".post_attention_layernorm."),
        ),
    }


def _starcoder2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), boolean(hf, "use_bias", True)) | {
        "num_kv_heads": optional_integer(hf, "num_key_value_heads", 2),
        "gated_mlp": False,
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": number(hf, "norm_epsilon", 1e-5),
        "layer_windows": window_everywhere(hf, fields),
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", True),
        "tensor_names": ((".c_fc.", ".up_proj."), (".c_proj.", ".down_proj.")),
    }


FAMILIES = (
    Family("NemotronForCausalLM", LlamaForCausalLM, _nemotron),
    Family("ArceeForCausalLM", LlamaForCausalLM, _arcee),
    Family("ApertusForCausalLM", LlamaForCausalLM, _apertus, rope_theta=12e6),
    Family("Starcoder2ForCausalLM", LlamaForCausalLM, _starcoder2),
)
