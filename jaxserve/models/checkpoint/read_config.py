"""Readers of config.json keys that several families share: checked numbers, the rotation, the sliding windows.

`hf_config` reads the common keys with them, and each family its own. `completed` first completes and checks the parsed
file: a published file omits values that equal the default of its class in transformers, and has one of several forms. A
key that would change the computation and is not supported is refused by name.

The files of sentence-transformers are read here too: the longest text, and the prompt before each text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.model_files import as_integer
from jaxserve.models.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)

Json = Mapping[str, Any]


def architecture_of(hf: Json) -> str:
    """Return the architecture name of a parsed config.json. Raises ValueError if there is none."""
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError("'architectures' must be a list with the architecture's name")
    return names[0]


# Keys beside `text_config` that are about the language model too. It may have them itself, and then its own count.
_BESIDE_TEXT = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
# Keys of the outer model, which count before those of `text_config`.
_OUTER = ("architectures", "auto_map", "tie_word_embeddings", "vision_config", "image_token_id")


def flattened(hf: Json) -> dict[str, Any]:
    """Return the keys of a parsed config.json that are about the language model, those of `text_config` on top.

    Whether the head is the table of embeddings is the outer model's to say, if it says so, as in transformers. Raises
    ValueError if `text_config` is not an object.
    """
    text = hf.get("text_config")
    if text is None:
        return dict(hf)
    if not isinstance(text, dict):
        raise ValueError(f"'text_config' must be an object, not {shown(text)}")
    beside = {key: hf[key] for key in _BESIDE_TEXT if hf.get(key) is not None}
    own = {key: value for key, value in text.items() if value is not None or key not in beside}
    outer = {key: hf[key] for key in _OUTER if hf.get(key) is not None}
    return beside | own | outer


# Smallest and largest value of each integer. The largest is at least ten times a published model's, and so small that
# a list with one entry per layer, head or expert fits into memory.
_INTEGERS = {
    "vocab_size": (1, 2**24),
    "num_hidden_layers": (1, 2000),
    "num_attention_heads": (1, 2**14),
    "num_key_value_heads": (1, 2**14),
    "max_position_embeddings": (1, 2**28),
    "sliding_window": (1, 2**31 - 1),
    "first_k_dense_replace": (0, 2000),
    "moe_layer_start_index": (0, 2000),
    "moe_layer_end_index": (-1, 2000),
    "moe_num_shared_experts": (0, 2**14),
    "num_local_experts": (0, 2**20),
    "n_shared_experts": (0, 2**14),
    "num_nextn_predict_layers": (0, 100),
    "mtp_num_hidden_layers": (0, 100),
    "num_kv_shared_layers": (0, 2000),
    "hidden_size_per_layer_input": (0, 2**20),
    "vocab_size_per_layer_input": (1, 2**24),
    "attention_chunk_size": (1, 2**31 - 1),
    "max_window_layers": (0, 2**31 - 1),
    "bos_token_id": (0, 2**24),
    "original_max_position_embeddings": (2, 2**28),  # its logarithm is a divisor
    "top_k": (-1, 2**31 - 1),
}
_ANY_INTEGER = (1, 2**20)
_NUMBERS = {
    "rms_norm_eps": (0.0, 1.0),
    "post_norm_eps": (0.0, 1.0),
    "layer_norm_eps": (0.0, 1.0),
    "norm_eps": (0.0, 1.0),
    "norm_epsilon": (0.0, 1.0),
    "partial_rotary_factor": (0.0, 1.0),
    "rope_theta": (1.5, 1e12),  # its logarithm is a divisor
    "rope_local_base_freq": (1.5, 1e12),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
}
_ANY_NUMBER = (1e-9, 1e12)


def shown(value: Any) -> str:
    """Format a value of a file for an error message, at most 60 characters."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number of more than 30 digits"
    return text if len(text) <= 60 else text[:57] + "..."


def integer(hf: Json, key: str) -> int:
    """Return the key's integer, which a file may write as 32768.0.

    Raises KeyError if it is absent and ValueError if it is out of range or has a fraction.
    """
    value = as_integer(hf[key])
    low, high = _INTEGERS.get(key, _ANY_INTEGER)
    if value is None or not low <= value <= high:
        raise ValueError(f"{key!r} must be an integer from {low} to {high}, not {shown(hf[key])}")
    return value


def optional_integer(hf: Json, key: str, default: Any) -> Any:
    """Return the key's integer, or the default if the key is absent or null."""
    return default if hf.get(key) is None else integer(hf, key)


def number(hf: Json, key: str, default: Any) -> Any:
    """Return the key's number as a float, or the default if the key is absent or null.

    Raises ValueError if it is not a number or out of range.
    """
    value = hf.get(key)
    if value is None:
        return default
    low, high = _NUMBERS.get(key, _ANY_NUMBER)
    if type(value) not in (int, float) or not low <= value <= high:  # false for NaN
        raise ValueError(f"{key!r} must be a number from {low:g} to {high:g}, not {shown(value)}")
    return float(value)


def boolean(hf: Json, key: str, default: bool) -> bool:
    """Return the key's value, or the default if the key is absent or null. Raises ValueError if it is not a boolean."""
    value = hf.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"{key!r} must be true or false, not {shown(value)}")
    return default if value is None else value


def _needed(p: Json, key: str) -> float:
    if p.get(key) is None:
        raise KeyError(key)
    return number(p, key, None)


def rope_config(hf: Json, head_dim: int, parameters: Json | None = None) -> RopeConfig:
    """Read the rotation from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`, which has both.

    parameters: used instead of the file's `rope_parameters`. Raises ValueError or KeyError for a damaged entry.
    """
    found: Json = parameters or hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = number(found, "rope_theta", number(hf, "rope_theta", 10000.0))
    partial = number(found, "partial_rotary_factor", number(hf, "partial_rotary_factor", 1.0))
    scaling = _scaling(hf, found)
    whole = isinstance(scaling, ProportionalScaling)
    return RopeConfig(rotary_dim=head_dim if whole else int(head_dim * partial), theta=theta, scaling=scaling)


def _scaling(hf: Json, p: Json) -> Scaling | None:
    kind = p.get("rope_type", p.get("type", "default"))
    match kind:
        # "dynamic" is the plain rotation up to the model's own context, which is the limit; "mrope" is an old name of
        # the plain rotation by several positions
        case "default" | "dynamic" | "mrope":
            return None
        case "linear":
            return LinearScaling(_needed(p, "factor"))
        case "llama3":
            return Llama3Scaling(
                _needed(p, "factor"),
                _needed(p, "low_freq_factor"),
                _needed(p, "high_freq_factor"),
                integer(p, "original_max_position_embeddings"),
            )
        case "yarn":
            return _yarn(hf, p)
        case "longrope" | "su":
            return _longrope(hf, p)
        case "proportional":
            return ProportionalScaling(number(p, "partial_rotary_factor", 1.0), number(p, "factor", 1.0))
    raise ValueError(
        f"rope scaling {kind!r} is not supported (supported: linear, llama3, yarn, longrope, proportional)"
    )


def _yarn(hf: Json, p: Json) -> YarnScaling:
    longest = integer(hf, "max_position_embeddings")
    original = optional_integer(p, "original_max_position_embeddings", longest)
    factor = number(p, "factor", longest / original)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        attention = _needed(p, "attention_factor")
    elif p.get("mscale") and p.get("mscale_all_dim"):
        attention = mscale(_needed(p, "mscale")) / mscale(_needed(p, "mscale_all_dim"))
    else:
        attention = mscale(1.0)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=number(p, "beta_fast", 32.0),
        beta_slow=number(p, "beta_slow", 1.0),
        attention_factor=attention,
        truncate=bool(p.get("truncate", True)),
    )


def _longrope(hf: Json, p: Json) -> LongRopeScaling:
    longest = integer(hf, "max_position_embeddings")
    inner = optional_integer(p, "original_max_position_embeddings", longest)
    original = optional_integer(hf, "original_max_position_embeddings", inner)
    factor = longest / original if longest > original else number(p, "factor", 1.0)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factor=tuple(float(f) for f in p["short_factor"]),
        long_factor=tuple(float(f) for f in p["long_factor"]),
        original_max_position=original,
        attention_factor=number(p, "attention_factor", default),
        long=longest > original,
    )


def rope_by_layer_type(hf: Json) -> bool:
    """Return whether the file has a rotation per layer type."""
    return "full_attention" in (hf.get("rope_parameters") or {})


def ropes_by_layer_type(hf: Json, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotation of full layers, and the one of sliding-window layers if the file has it."""
    if not rope_by_layer_type(hf):
        return rope_config(hf, head_dim), None
    by_type = hf["rope_parameters"]
    return rope_config(hf, head_dim, by_type["full_attention"]), rope_config(hf, head_dim, by_type["sliding_attention"])


MAX_LABELS = 2**16
MAX_LABEL_CHARS = 1024


def head_labels(hf: Json) -> dict[str, Any]:
    """Return the fields labels and multi_label. Raises ValueError for damaged labels."""
    names = hf.get("id2label")
    if names is None:
        count = optional_integer(hf, "num_labels", 2)
        names = {str(i): f"LABEL_{i}" for i in range(min(count, MAX_LABELS + 1))}
    if not isinstance(names, dict) or not 0 < len(names) <= MAX_LABELS:
        raise ValueError(f"'id2label' must be an object of at most {MAX_LABELS} labels")
    labels = tuple(names.get(str(i)) for i in range(len(names)))
    if not all(isinstance(label, str) and len(label) <= MAX_LABEL_CHARS for label in labels):
        raise ValueError(f"'id2label' must name the labels 0 to {len(names) - 1}")
    return {"labels": labels, "multi_label": hf.get("problem_type") == "multi_label_classification"}


def head_dim_or(hf: Json, default: int) -> dict[str, Any]:
    """Return the fields head_dim and rope, for families whose default head_dim is not hidden_size / num_heads."""
    head_dim = optional_integer(hf, "head_dim", default)
    return {"head_dim": head_dim, "rope": rope_config(hf, head_dim) if not rope_by_layer_type(hf) else None}


def predictors(hf: Json, layers: int) -> tuple[str, ...]:
    """Return the expressions of tensors of layers for multi-token prediction, which come after the model's own."""
    count = optional_integer(hf, "num_nextn_predict_layers", 0)
    return tuple(rf"^model\.layers\.{index}\." for index in range(layers, layers + count))


def sparse_layers(hf: Json, layers: int, dense: int) -> tuple[bool, ...]:
    """Return which layers have experts: by `mlp_layer_types`, else all but the first `first_k_dense_replace`.

    dense: the number of first dense layers if the file says neither. Raises ValueError if the two differ, or for other
    types.
    """
    first = optional_integer(hf, "first_k_dense_replace", dense)
    by_place = tuple(index >= first for index in range(layers))
    types = hf.get("mlp_layer_types")
    if types is None:
        return by_place
    if not isinstance(types, list) or len(types) != layers or set(types) - {"dense", "sparse"}:
        raise ValueError(
            f"'mlp_layer_types' must be 'dense' or 'sparse' for each of {layers} layers, not {shown(types)}"
        )
    by_type = tuple(each == "sparse" for each in types)
    if hf.get("first_k_dense_replace") is not None and by_type != by_place:
        raise ValueError("'mlp_layer_types' and 'first_k_dense_replace' differ")
    return by_type


def window_everywhere(hf: Json, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the same window for each layer; () if there is none or it is not shorter than the context."""
    window = optional_integer(hf, "sliding_window", None)
    if window is None or window >= fields["max_position_embeddings"]:
        return ()
    return (window,) * fields["num_layers"]


def sparse_by_step(hf: Json, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: each `decoder_sparse_step`-th, without those of `mlp_only_layers`."""
    dense, step = set(hf.get("mlp_only_layers") or ()), optional_integer(hf, "decoder_sparse_step", 1)
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(layers))


def windows_by_type(hf: Json, window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`; () if the file has none."""
    types = hf.get("layer_types") or ()
    return tuple(window if t == "sliding_attention" else None for t in types)


def windows_but_every(hf: Json, window: int | None, layers: int, period: int) -> tuple[int | None, ...]:
    """Return the window of each layer: by `layer_types`, or if the file has none, in all but every `period`-th."""
    by_place = tuple(window if (i + 1) % period else None for i in range(layers))
    return windows_by_type(hf, window) or by_place


_CAUSAL = {"is_causal": (True,)}
_ENCODER = {"is_decoder": (False,), "hidden_act": ("gelu",)}
_GEMMA = _CAUSAL | {"hidden_activation": ("gelu_pytorch_tanh", "gelu_new")}

# A family's name in the tables below: the architecture's name without its task.
_TASKS = ("ForCausalLM", "ForSequenceClassification", "Model")
_GLM = {"rms_norm_eps": 1.5625e-07, "head_dim": 128, "partial_rotary_factor": 0.5}
_GEMMA_SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
# Defaults of transformers' classes that differ from the families' defaults here.
_DEFAULTS: Mapping[str, Json] = MappingProxyType(
    {
        "Phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        "Mixtral": {"rms_norm_eps": 1e-5},
        "Olmo2": {"rms_norm_eps": 1e-5},
        "Olmo3": {"rms_norm_eps": 1e-5},
        "GptOss": {"rms_norm_eps": 1e-5},
        "Ernie4_5": {"rms_norm_eps": 1e-5},
        "Gemma3": {"vocab_size": 262208, "hidden_activation": "gelu_pytorch_tanh"} | _GEMMA_SIZES,
        "Llama4": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        "MuseGlimmer": {"rms_norm_eps": 1e-5},
        "Gemma4": {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True} | _GEMMA_SIZES,
        "InternLM3": {"rms_norm_eps": 1e-5},
        "Exaone4": {"rms_norm_eps": 1e-5},
        "Arcee": {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        "Apertus": {"rms_norm_eps": 1e-5, "hidden_act": "xielu"},
        "Nemotron": {"partial_rotary_factor": 0.5, "hidden_act": "relu2"},
        "Starcoder2": {"hidden_act": "gelu_pytorch_tanh"},
        "Glm": _GLM,
        "Glm4": _GLM,
        "Helium": {"rms_norm_eps": 1e-8, "head_dim": 128},
        "HunYuanDenseV1": {"rms_norm_eps": 1e-5},
        "DeepseekV3": {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    }
)
# The rotations of classes whose default is not the plain one.
_ROTATIONS: Mapping[str, Json] = MappingProxyType(
    {
        "GptOss": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "Apertus": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
)
# The supported values of each key, for a family or, as _CAUSAL, for all others. An absent key and null are supported.
_COMPUTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "Gemma2": _GEMMA | {"use_bidirectional_attention": (False,)},
        "Gemma3": _GEMMA,
        "Gemma3Text": _GEMMA,
        "Gemma4": _GEMMA,
        "GptOss": _CAUSAL | {"swiglu_alpha": (1.702,)},
        "Cohere": _CAUSAL | {"use_qk_norm": (False,)},
        "Cohere2": _CAUSAL
        | {
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1.0,),
            "use_parallel_block": (True,),
            "use_gated_activation": (True,),
        },
        "HunYuanDenseV1": _CAUSAL | {"use_qk_norm": (True,), "use_cla": (False,)},
        "Ernie4_5_Moe": _CAUSAL | {"use_bias": (False,), "moe_norm_min": (1e-12,), "compression_ratio": (1.0,)},
        "Ernie4_5": _CAUSAL | {"compression_ratio": (1.0,)},  # of positions
        "Bert": _ENCODER,
        "Roberta": _ENCODER,
        "XLMRoberta": _ENCODER,
    }
)
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_LAYER_TYPES = (_FULL, _SLIDING, "attention")
_DELTA, _SHORT = ("linear_attention",), ("conv",)
# Families with recurrent layers, and the types beside full attention.
_WITH_STATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Qwen3Next": _DELTA,
        "Qwen3_5": _DELTA,
        "Qwen3_5Moe": _DELTA,
        "Lfm2": _SHORT,
        "Lfm2Moe": _SHORT,
        # two names of either
        "GraniteMoeHybrid": ("attention", "mamba", "linear_attention"),
        "NemotronH": ("attention", "mamba", "linear_attention", "mlp", "moe"),
        "KimiLinear": _DELTA,
    }
)


def completed(
    hf: Json, rope_theta: float, supported: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the keys of a parsed config.json with the defaults of its class, and its rotation in one form.

    rope_theta: the rotation's default base. supported: see `family.Family`.

    Raises ValueError, KeyError or TypeError for damaged or unsupported keys.
    """
    family = architecture_of(hf)
    for task in _TASKS:
        family = family.removesuffix(task)
    keys = {**_DEFAULTS.get(family, {}), **hf}
    if keys.get("rope_theta") is None:
        keys["rope_theta"] = rope_theta
    if family == "KimiLinear" and keys.get("max_position_embeddings") is None:
        keys["max_position_embeddings"] = keys.get("model_max_length", 1048576)
    if family == "Qwen3Moe" and keys.get("num_experts") is None:
        keys["num_experts"] = keys.get("num_local_experts")
    for key, computed in {**_COMPUTED.get(family, _CAUSAL), **supported}.items():
        if keys.get(key) is not None and keys[key] not in computed:
            names = ", ".join(map(shown, computed))
            raise ValueError(f"{key!r} is {shown(keys[key])}, which is not supported (supported: {names})")
    return keys | _layers(keys, family) | _rotation(keys, family)


def _layers(keys: Json, family: str) -> dict[str, Any]:
    """Return the changed keys that have an entry for each layer."""
    types, changes = keys.get("layer_types") or [], {}
    known = (_FULL, _CHUNKED) if family == "Llama4" else _LAYER_TYPES
    known = (_FULL, *_WITH_STATES[family]) if family in _WITH_STATES else known
    for each in types:
        if each not in known:
            raise ValueError(f"layer type {shown(each)} is not supported (supported: {', '.join(known)})")
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
    given = dict(new or old or _ROTATIONS.get(family, {}))
    return {"rope_parameters": _one_rotation(keys, given, family), "rope_scaling": None}


def _by_layer_type(keys: Json, given: Json) -> dict[str, Any]:
    """Return the rotation of each layer type, of which `given` may lack some."""
    local = 10000.0 if "Gemma3" in architecture_of(keys) else keys["rope_theta"]
    bases = {_FULL: keys["rope_theta"], _SLIDING: number(keys, "rope_local_base_freq", local)}
    plain = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    return {kind: plain[kind] | (given.get(kind) or {}) for kind in plain}


def _one_rotation(keys: Json, given: dict[str, Any], family: str) -> dict[str, Any]:
    """Return `given` completed from the keys beside it, as transformers does."""
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
