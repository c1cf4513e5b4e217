"""Step 3.5 Flash and 3.7 Flash as text: Laguna's layers with sigmoid gates, and norm weights around zero.

Window layers have more query heads. The last layers clamp what the halves of their gated MLPs return, in the routed
experts and in the shared one by different numbers. Published files pad lists of layers with those for multi-token
prediction.

The head for it reads the hidden states before the final norm. Published files have three layers, each with an output
head of its own, and each goes on with the result of the one before it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import (
    Json,
    integer,
    number,
    optional_integer,
    predictors,
    rope_by_layer_type,
    ropes_by_layer_type,
    shown,
    sparse_layers,
    windows_by_type,
)
from jaxserve.models.config import LayerHeads, ModelConfig, MoEConfig, MoENames, PredictorHead
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.draft_head import of_layers
from jaxserve.models.families.laguna import GatedAttention
from jaxserve.models.family import TOWERS, Family, Nested
from jaxserve.models.layers import MLP
from jaxserve.models.moe import MoEBlock, block_name
from jaxserve.models.tensor_names import Rules


class Step3p7ForCausalLM(CausalLM):
    """Pre-norm layers with gated attention and clamped MLPs."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        attention = GatedAttention(config.at(index), dtype, 1, "sigmoid")
        block = block_name(config, index)
        return PreNormLayer(config, dtype, attention, _feed_forward(config, index, dtype), block)


def _feed_forward(config: ModelConfig, index: int, dtype: jnp.dtype) -> MLP | MoEBlock:
    routed, other = config.layer_limits[index] if config.layer_limits else (0.0, 0.0)
    mlp = _clamped(config, other)
    if config.moe is None or not config.moe.sparse_layers[index]:
        return MLP(mlp, dtype)
    block = MoEBlock(_clamped(config, routed), config.moe, dtype)
    setattr(block, config.moe.names.shared, MLP(mlp, dtype, config.moe.shared_ffn))
    return block


def _clamped(config: ModelConfig, limit: float) -> ModelConfig:
    return config.replace(activation="clamped_silu", activation_limit=limit) if limit else config


_NAMES = MoENames("moe", correction="router_bias", shared="share_expert")
_PARTS = {  # names in the layer of the head -> the head's parts
    "enorm": "token_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "join",
    "transformer.shared_head.norm": "norm",
    "transformer.shared_head.output": "lm_head",
}
_OF_MODEL = ("lm_head.", "model.lm_head.")  # not the head's
_FULL, _LOCAL = "full_attention", "sliding_attention"
_OTHERS = {  # published key -> transformers' name of it
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
_SUPPORTED = {
    "scoring_func": ("sigmoid",),
    "moe_router_activation": ("sigmoid",),
    "use_moe_router_bias": (True,),
    "use_head_wise_attn_gate": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "n_shared_experts": (1,),
}
_PROJECTOR = r"^vit_large_projector\."
_LISTS = ("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors")
_LIMITS = ("swiglu_limits", "swiglu_limits_shared")


def _published(hf: Json) -> dict[str, Any]:
    """Return a parsed config.json with the keys of transformers' class, and without the layers that predict more."""
    layers = integer(hf, "num_hidden_layers")
    found = {_OTHERS.get(key, key): value for key, value in hf.items()}
    lists = [key for key in (*_LISTS, *_LIMITS) if isinstance(found.get(key), list)]
    found |= {f"mtp_{key}": found[key][layers:] for key in lists if len(found[key]) > layers}
    found |= {key: found[key][:layers] for key in lists}
    types = found.setdefault("layer_types", None) or [_FULL] * layers
    if not rope_by_layer_type(found):
        found["rope_parameters"] = _by_type(found, types)
        found["rope_theta"] = found["rope_scaling"] = found["partial_rotary_factors"] = None
    numbers = found.get("moe_layers_enum")
    if numbers is not None and found.get("mlp_layer_types") is None:
        sparse = {int(each) for each in (numbers.split(",") if isinstance(numbers, str) else numbers)}
        found["mlp_layer_types"] = ["sparse" if index in sparse else "dense" for index in range(layers)]
        behind = range(layers, layers + max(1, optional_integer(hf, "num_nextn_predict_layers", 0)))
        of_head = ["sparse" if index in sparse else "dense" for index in behind]
        found["mtp_mlp_layer_types"] = found.get("mtp_mlp_layer_types") or of_head
    other = found.get("attention_other_setting") or {}
    for key, value in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
        if other.get(key) not in (None, found.get(value)):
            raise ValueError(f"{key!r} of 'attention_other_setting' is {shown(other[key])}, which is not supported")
    if found.get("num_sliding_attention_heads") is None:
        found["num_sliding_attention_heads"] = other.get("num_attention_heads")
    return found


def _by_type(hf: Json, types: list[str]) -> dict[str, Any]:
    """Return the rotation of each layer type. Files have the base and the rotated part of each layer."""
    count, bases = len(types), hf.get("rope_theta") or 1e4
    bases = bases if isinstance(bases, list) else [bases] * count
    parts = hf.get("partial_rotary_factors") or [1.0] * count
    kinds = set(zip(types, bases, parts, strict=True))
    if len(kinds) != len(set(types)):
        raise ValueError("'rope_theta' and 'partial_rotary_factors' must be the same for all layers of a type")
    found = {
        kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part} for kind, base, part in kinds
    }
    full = found.get(_FULL, {}) | (hf.get("rope_scaling") or {})
    return {_FULL: full, _LOCAL: found.get(_LOCAL, full)}


def _step3p7(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers, head_dim = fields["num_layers"], optional_integer(hf, "head_dim", 128)
    full = LayerHeads(fields["num_heads"], fields["num_kv_heads"], head_dim)
    local = dataclasses.replace(full, num_heads=optional_integer(hf, "num_sliding_attention_heads", full.num_heads))
    windows = windows_by_type(hf, optional_integer(hf, "sliding_window", None))
    rope, local_rope = ropes_by_layer_type(hf, head_dim)
    scalar = number(hf, "query_pre_attn_scalar", None)
    experts = MoEConfig(
        num_experts=integer(hf, "n_routed_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        ffn=integer(hf, "moe_intermediate_size"),
        sparse_layers=sparse_layers(hf, layers, 3),
        router="sigmoid",
        correction=True,
        scale=number(hf, "moe_router_scaling_factor", 1.0),
        shared_ffn=integer(hf, "share_expert_dim"),
        names=_NAMES,
    )
    limits = tuple(zip(*(_limits(hf, key, layers) for key in _LIMITS), strict=True))
    return {
        "head_dim": head_dim,
        "rope": rope,
        "local_rope": local_rope,
        "layer_windows": windows,
        "layer_heads": tuple(full if each is None else local for each in windows) if full != local else (),
        "layer_limits": limits if any(map(any, limits)) else (),
        "attention_scale": None if scalar is None else scalar**-0.5,
        "qk_norm": "head",
        "norm_offset": 1.0,
        "output_gate": "per-head",
        "moe": experts,
        "packed_experts": "stacked",
        "tensor_names": ((".share_expert.", ".moe.share_expert."),),
        "ignored_tensors": predictors(hf, layers),
        "predictor": _head(hf, windows, limits),
    }


def _head(hf: Json, windows: tuple[int | None, ...], limits: tuple[tuple[float, float], ...]) -> PredictorHead | None:
    """Return the head; None: none is described, or no layer of the model has its window, rotation and clamp.

    windows, limits: of the model's layers
    """
    layers, kinds = len(limits), hf.get("mtp_layer_types")
    own = predictors(hf, layers)
    if not own or not kinds:
        return None
    rope = hf["rope_parameters"].get(kinds[0], {})
    expected = {
        "mlp_layer_types": "dense",
        "rope_theta": rope.get("rope_theta"),
        "partial_rotary_factors": rope.get("partial_rotary_factor"),
    }
    if any((hf.get(f"mtp_{key}") or [value])[0] != value for key, value in expected.items()):
        return None
    clamp = (hf.get("mtp_swiglu_limits_shared") or [0.0])[0] or 0.0
    like = [(window is not None, mlp) for window, (_, mlp) in zip(windows or (None,) * layers, limits, strict=True)]
    if (kind := (kinds[0] == _LOCAL, clamp)) not in like:
        return None
    keys = ("layer_types", "swiglu_limits_shared", *expected)
    given = [values for key in keys if (values := hf.get(f"mtp_{key}"))]
    others = (n for n in range(1, len(own)) if any(n < len(values) and values[n] != values[0] for values in given))
    count = next(others, len(own))  # a layer of another kind makes no guess, nor do those behind it
    rules = of_layers(count, lambda index: _of_layer(f"model.layers.{layers + index}."))
    return PredictorHead(
        (*rules, _OF_MODEL),
        taps=(layers,),
        feeds_normed=False,
        like=like.index(kind),
        sparse=False,
        own_output=True,
        layers=count,
        chained=True,
    )


def _of_layer(start: str) -> Rules:
    """Return the rules of the names that begin with `start`."""
    return (*((f"{start}{there}.", f"{here}.") for there, here in _PARTS.items()), (start, "layer."))


def _limits(hf: Json, key: str, layers: int) -> list[float]:
    """Return the clamp of each layer; 0: none, for which files have 0 or null.

    Raises ValueError for another number of layers.
    """
    found = hf.get(key) or [0.0] * layers
    if not isinstance(found, list) or len(found) != layers:
        raise ValueError(f"{key!r} must have {layers} entries, not {shown(found)}")
    return [number({key: each or None}, key, 0.0) for each in found]


_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
}
_NAME = "Step3p7ForCausalLM"

FAMILIES = (
    *(
        Family(name, Step3p7ForCausalLM, _step3p7, defaults=_DEFAULTS, published=_published, supported=_SUPPORTED)
        for name in (_NAME, "Step3p7FlashForCausalLM", "Step3p5ForCausalLM")
    ),
    Nested(("Step3p7ForConditionalGeneration",), {"step3p5": _NAME}, (*TOWERS, _PROJECTOR)),
)
