"""Present a GGUF file as the safetensors checkpoint that it was made of: the keys of its config.json, and its tensors.

Published names are those of the safetensors checkpoint; this file maps GGUF's names to them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import gguf_file, read_object
from jaxserve.models.hf_keys import Json, shown
from jaxserve.models.loading.file_formats.gguf_blocks import BlockTensor
from jaxserve.models.loading.file_formats.gguf_file import GgufFile, read_gguf
from jaxserve.models.loading.file_formats.safetensors_file import TensorInfo, read_rows
from jaxserve.models.stored_form import HELD_BLOCKS

_ARCHITECTURES = MappingProxyType(
    {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)
_EPSILON = "attention.layer_norm_rms_epsilon"
_KEYS = MappingProxyType(
    {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "context_length": "max_position_embeddings",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        _EPSILON: "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    }
)
_SCALING_KEYS = MappingProxyType(
    {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
)
# Keys that change nothing here, or that are read below; any other is refused unless it is 0.
_OTHER_KEYS = ("vocab_size", "rope.dimension_count", "attention.value_length", "attention.causal")
_OTHER_KEYS += ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned")
# Values of other keys that are computed: llama.cpp's defaults, and notes of converters.
_DEFAULTS = MappingProxyType(
    {
        **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.attn_factor"), (1,)),
        **dict.fromkeys(("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"), (1,)),
        "attention.max_alibi_bias": (0,),
        "attention.layer_norm_epsilon": (1e-5, 1e-6),
        "pooling_type": (3,),  # the last token's state, as here
        "tensor_data_layout": ("Meta AI original pth", "reference"),
    }
)
_NAMES = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    | {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}
    | {"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    | {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
)
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_ROTATED = re.compile(r"\.[qk]_proj\.")  # a llama's rows of these are interleaved in the file
_ROPE_FACTORS = "rope_freqs.weight"
_DTYPES = MappingProxyType({"F32": "float32", "F16": "float16"})


def config_file(directory: Path) -> Path:
    """Return the file that describes a model: its GGUF file, or its config.json. directory: may be a GGUF file."""
    return gguf_file(directory) or directory / "config.json"


def published_config(file: Path) -> dict[str, Any]:
    """Return the object of a config.json, or what it would be of a GGUF file. Raises ModelLoadError."""
    return _as_published(read_gguf(file)) if file.suffix.lower() == ".gguf" else read_object(file)


def published_tensors(path: Path) -> dict[str, TensorInfo | BlockTensor]:
    """Return the tensors of a GGUF file by their names in the model's safetensors checkpoint.

    Raises ModelLoadError if the file is damaged or its architecture is not supported.
    """
    file = read_gguf(path)
    config = _as_published(file)
    interleaved = config["architectures"] == ["LlamaForCausalLM"]
    found: dict[str, TensorInfo | BlockTensor] = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        full = _full_name(name)
        if interleaved and _ROTATED.search(full):
            tensor = dataclasses.replace(tensor, head_rows=_head_dim(config))
        found[full] = _plain(tensor)
    return found


def _plain(tensor: BlockTensor) -> TensorInfo | BlockTensor:
    """Return a tensor of numbers as they lie in the file in the form that is read without a copy."""
    if tensor.block.count > 1 or tensor.head_rows:
        return tensor
    return TensorInfo(tensor.raw.file, tensor.block.dtype, tensor.shape, tensor.raw.begin)


def _full_name(name: str) -> str:
    """Return the published name; an unknown one is returned as it is, and is reported as a tensor that does not fit."""
    layer = _LAYER.fullmatch(name)
    base, _, kind = (layer.group(2) if layer else name).rpartition(".")
    if base not in _NAMES:
        return name
    return f"model.layers.{layer.group(1)}.{_NAMES[base]}.{kind}" if layer else f"{_NAMES[base]}.{kind}"


def _quantised_types(file: GgufFile) -> dict[str, str]:
    """Return the types of the quantised modules; none if no layer has one.

    Embeddings and a head of types that are not kept in few bits are not among them: they are converted.
    """
    found: dict[str, str] = {}
    for name, tensor in file.tensors.items():
        quantised = tensor.block.count > 1 and len(tensor.shape) == 2
        if quantised and (_LAYER.match(name) or tensor.block.name in HELD_BLOCKS):
            found[_full_name(name).removesuffix(".weight")] = tensor.block.name
    return found if any(name.startswith("model.layers.") for name in found) else {}


def _head_dim(config: Json) -> int:
    """Return the size of a head. Raises ValueError if the header has none that can be."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    sizes = (config.get("head_dim", 0), hidden, heads)
    if not all(type(size) is int and size >= 0 for size in sizes) or not heads:
        raise ValueError(f"heads of {shown(sizes)} cannot be")
    return config.get("head_dim") or hidden // heads


def _as_published(file: GgufFile) -> dict[str, Any]:
    name = file.values.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelLoadError(
            f"{file.path}: {shown(name)} of GGUF is not supported", fix=f"serve one of: {supported}, or safetensors"
        )
    own = {key.removeprefix(f"{name}."): value for key, value in file.values.items() if key.startswith(f"{name}.")}
    _refuse_others(file.path, own)
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[name]]}
    config |= {key: own[given] for given, key in _KEYS.items() if given in own}
    config |= {"head_dim": _head_dim(config)} | _token_ids(file)
    tensors = file.tensors
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_output.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    if own.get("rope.dimension_count") not in (None, config["head_dim"]):
        raise ModelLoadError(f"{file.path}: partly rotated heads are not supported")
    return config | _scaling(file, own) | _numbers(file)


def _refuse_others(path: Path, own: Json) -> None:
    known = {*_KEYS, *_OTHER_KEYS, *(f"rope.scaling.{key}" for key in _SCALING_KEYS)}
    others = sorted(key for key, value in own.items() if value and key not in known and not _is_default(own, key))
    if others:
        raise ModelLoadError(f"{path} has values that are not supported: {', '.join(others)[:200]}")
    if own.get("attention.causal", True) is not True:
        raise ModelLoadError(f"{path}: attention to later tokens (attention.causal) is not supported")
    if _EPSILON not in own:
        raise ModelLoadError(f"{path}: {_EPSILON} is missing", fix="download the file again")


def _is_default(own: Json, key: str) -> bool:
    """Return whether a key has the value that llama.cpp takes without it, or one that changes nothing."""
    value = own[key]
    match key:
        case "attention.scale":
            size = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
            return math.isclose(value, size**-0.5, rel_tol=1e-5)
        case "attention.sliding_window":
            return isinstance(value, int) and value >= own.get("context_length", math.inf)
        case "expert_used_count" | "expert_shared_count" | "expert_weights_scale" | "expert_weights_norm":
            return not own.get("expert_count")
        case "rope.dimension_count_swa" | "attention.key_length_swa" | "attention.value_length_swa":
            return not own.get("attention.sliding_window")
    return key in _DEFAULTS and value in _DEFAULTS[key]


def _token_ids(file: GgufFile) -> dict[str, Any]:
    bos, *ends = (file.values.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom"))
    return {"bos_token_id": bos, "eos_token_id": sorted({*ends} - {None}, key=str)}


def _numbers(file: GgufFile) -> dict[str, Any]:
    """Return the keys of a config.json that say in which form its weights are."""
    types = _quantised_types(file)
    if types:
        return {"dtype": "float16", "quantization_config": {"quant_method": "gguf", "types": types}}
    kinds = {tensor.block.name for name, tensor in file.tensors.items() if _LAYER.match(name) and len(tensor.shape) > 1}
    return {"dtype": _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"}


def _scaling(file: GgufFile, own: Json) -> dict[str, Any]:
    """Return `rope_scaling`. A file without a type has the type linear, and a factor of 0 is 1, as in llama.cpp."""
    kind, factor = own.get("rope.scaling.type", "linear"), own.get("rope.scaling.factor") or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise ModelLoadError(f"{file.path}: rope scaling {shown(kind)} of GGUF is not supported")
    plain = kind == "none" or (kind == "linear" and factor == 1)
    if _ROPE_FACTORS in file.tensors:
        if not plain:
            raise ModelLoadError(f"{file.path}: {_ROPE_FACTORS} beside rope scaling {shown(kind)} is not supported")
        return {"rope_scaling": _divided(file.path, file.tensors[_ROPE_FACTORS])}
    if plain:
        return {}
    given = {key: own.get(f"rope.scaling.{name}") for name, key in _SCALING_KEYS.items()}
    return {"rope_scaling": {"rope_type": kind, "factor": factor} | given}


def _divided(path: Path, tensor: BlockTensor) -> dict[str, Any]:
    """Return Llama 3's scaling, a divisor for each frequency, as LongRoPE's keys express it."""
    if tensor.block.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 2**12:
        raise ModelLoadError(f"{path}: {_ROPE_FACTORS} is no vector of float32", fix="download the file again")
    factors = read_rows(tensor.raw, 0, tensor.shape[0], np.empty(tensor.raw.num_bytes, np.uint8)).view(np.float32)
    divisors = [float(factor) for factor in factors[:, 0]]
    return {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
