"""EXAONE 4 (https://arxiv.org/abs/2507.11407): OLMo 2's layers, and norms over each query and key head.

K-EXAONE has its attention in pre-norm layers, with DeepSeek-V3's router and experts. It and the 32B have a
sliding window in three of four layers, and only these have positions. The layer of its head for multi-token prediction
has neither, as in TensorRT-LLM and Megatron Bridge, and an MLP; in SGLang it is like the first layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.models.checkpoint.read_config import Json, optional_integer, windows_by_type
from jaxserve.models.config import MoENames, PredictorHead
from jaxserve.models.draft_head import UNDER_MTP
from jaxserve.models.families.deepseek_v3 import deepseek_experts
from jaxserve.models.families.llama import LlamaForCausalLM
from jaxserve.models.families.olmo2 import OlmoForCausalLM
from jaxserve.models.family import Family


def _exaone4(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    window = optional_integer(hf, "sliding_window", None if "sliding_window" in hf else 4096)
    changes = {"qk_norm": "head", "qkv_bias": False, "out_bias": False, "mlp_bias": False}
    if window is None:
        return changes
    windows = windows_by_type(hf, window)
    if not windows:  # a pattern of letters comes with `layer_types`
        interval = optional_integer(hf, "sliding_window_pattern", 4)
        windows = tuple(window if (i + 1) % interval else None for i in range(fields["num_layers"]))
    return changes | {"layer_windows": windows, "rope_layers": tuple(each is not None for each in windows)}


def _exaone_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    keys = {**hf, "n_routed_experts": hf["num_experts"], "n_shared_experts": hf["num_shared_experts"]}
    names = MoENames(correction="e_score_correction_bias")
    experts = dataclasses.replace(deepseek_experts(keys, fields, dense=1), names=names)
    changes = _exaone4(hf, fields) | {"moe": experts, "ignored_tensors": (r"^mtp\.",)}
    return changes | {"predictor": _head(hf, changes.get("layer_windows", ()))}


def _head(hf: Json, windows: tuple[int | None, ...]) -> PredictorHead | None:
    """Return the head; None: the configuration mentions none, or one with a window."""
    if not optional_integer(hf, "num_nextn_predict_layers", 0) or (windows and None not in windows):
        return None
    if (hf.get("mtp_layer_types") or ["full_attention"])[0] != "full_attention":
        return None
    return PredictorHead(UNDER_MTP, like=windows.index(None) if windows else None, sparse=False)


_MOE = {
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.5,
}

FAMILIES = (
    Family("Exaone4ForCausalLM", OlmoForCausalLM, _exaone4),
    Family("ExaoneMoeForCausalLM", LlamaForCausalLM, _exaone_moe, defaults=_MOE),
)
