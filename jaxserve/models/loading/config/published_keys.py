"""A parsed config.json, completed and checked before the family reads it.

A published file leaves out what equals the default of its class in transformers, and has one of several forms. A key
that would change what is computed and is not supported is refused here by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.models.hf_keys import Json, architecture_of, integer, number, optional_integer, shown

_CAUSAL = {"is_causal": (True,)}
_ENCODER = {"is_decoder": (False,), "hidden_act": ("gelu",)}
_GEMMA = _CAUSAL | {"hidden_activation": ("gelu_pytorch_tanh", "gelu_new")}

# What the tables below call a family: the architecture's name without its task.
_TASKS = ("ForCausalLM", "ForSequenceClassification", "Model")
# Defaults of the classes that differ from those of the families.
_DEFAULTS: Mapping[str, Json] = MappingProxyType(
    {
        "Phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        "Mixtral": {"rms_norm_eps": 1e-5},
        "Olmo2": {"rms_norm_eps": 1e-5},
        "Olmo3": {"rms_norm_eps": 1e-5},
        "GptOss": {"rms_norm_eps": 1e-5},
        "DeepseekV3": {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    }
)
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
# The values that are computed, _CAUSAL of the others. An absent key and null are always one of them.
_COMPUTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "Gemma2": _GEMMA,
        "Gemma3": _GEMMA,
        "Gemma3Text": _GEMMA,
        "GptOss": _CAUSAL | {"swiglu_alpha": (1.702,)},
        "Bert": _ENCODER,
        "Roberta": _ENCODER,
        "XLMRoberta": _ENCODER,
    }
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYER_TYPES = (_FULL, _SLIDING, "attention")


def completed(hf: Json, rope_theta: float) -> dict[str, Any]:
    """Return the keys of a parsed config.json with the defaults of its class, and its rotation in one form.

    rope_theta: of a file that has none. Raises ValueError, KeyError or TypeError for what is damaged or not computed.
    """
    family = architecture_of(hf)
    for task in _TASKS:
        family = family.removesuffix(task)
    keys = {**_DEFAULTS.get(family, {}), **hf}
    if keys.get("rope_theta") is None:
        keys["rope_theta"] = rope_theta
    if family == "Qwen3Moe" and keys.get("num_experts") is None:
        keys["num_experts"] = keys.get("num_local_experts")
    for key, computed in _COMPUTED.get(family, _CAUSAL).items():
        if keys.get(key) is not None and keys[key] not in computed:
            names = ", ".join(map(shown, computed))
            raise ValueError(f"{key!r} is {shown(keys[key])}, which is not supported (supported: {names})")
    return keys | _layers(keys, family) | _rotation(keys, family)


def _layers(keys: Json, family: str) -> dict[str, Any]:
    """Return the changed keys that have an entry for each layer."""
    types, changes = keys.get("layer_types") or [], {}
    for each in types:
        if each not in _LAYER_TYPES:
            raise ValueError(f"layer type {shown(each)} is not supported (supported: {', '.join(_LAYER_TYPES)})")
    if family == "Mistral" and set(types) - {_SLIDING}:
        if _SLIDING in types:
            raise ValueError("'layer_types' of Mistral must be of one kind: windows in some layers are not supported")
        changes["sliding_window"] = None
    rotated = keys.get("no_rope_layers")
    if rotated:
        changes["no_rope_layers"] = rotated[: integer(keys, "num_hidden_layers")]  # a longer list is allowed
    return changes


def _rotation(keys: Json, family: str) -> dict[str, Any]:
    """Return `rope_parameters`, the newer form, in place of `rope_scaling`."""
    new, old = keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {}
    for each in (new, old):
        if not isinstance(each, dict):
            raise ValueError(f"'rope_parameters' and 'rope_scaling' must be objects, not {shown(each)}")
    by_type = new.keys() & {_FULL, _SLIDING}
    same = (new.get(_FULL) or {}) if by_type else new
    if new and any(same.get("rope_type" if key == "type" else key) != value for key, value in old.items()):
        raise ValueError("'rope_parameters' and 'rope_scaling' are both given and differ")
    if by_type:
        return {"rope_parameters": _by_layer_type(keys, new), "rope_scaling": None}
    given = dict(new or old or (_GPT_OSS_ROPE if family == "GptOss" else {}))
    return {"rope_parameters": _one_rotation(keys, given, family), "rope_scaling": None}


def _by_layer_type(keys: Json, given: Json) -> dict[str, Any]:
    """Return the rotation of each layer type, of which `given` may lack some."""
    local = 10000.0 if "Gemma3" in architecture_of(keys) else keys["rope_theta"]
    bases = {_FULL: keys["rope_theta"], _SLIDING: number(keys, "rope_local_base_freq", local)}
    plain = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    return {kind: plain[kind] | (given.get(kind) or {}) for kind in plain}


def _one_rotation(keys: Json, given: dict[str, Any], family: str) -> dict[str, Any]:
    """Return `given` with what transformers takes from the keys beside it."""
    kind = given.get("rope_type", given.get("type"))
    if family == "Phi3" and kind in ("su", "yarn"):  # old names
        kind = given["rope_type"] = "longrope"
    original = "original_max_position_embeddings"
    if kind in ("llama3", "yarn", "longrope") and keys.get(original) is not None:
        given[original] = keys[original]
    if kind == "longrope" and given.get("factor") is not None and given.get("attention_factor") is None:
        factor = max(1.0, number(given, "factor", 1.0))
        start = optional_integer(given, original, integer(keys, "max_position_embeddings"))
        given["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(start))
    return given
