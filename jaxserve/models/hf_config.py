"""A published config.json (and generation_config.json), translated into ModelConfig.

With hf_keys.py and hf_families.py the one place that knows Hugging Face's keys and each family's unwritten defaults:
a published file leaves out what equals the default of its class. Reads JSON only; nothing of a checkpoint is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import GenerationDefaults, ModelConfig
from jaxserve.models.hf_families import FAMILIES, no_changes, rope_by_layer_type
from jaxserve.models.hf_keys import Json, architecture_of, integer, optional_integer, rope_config
from jaxserve.models.registry import model_class


def read_config(directory: Path) -> ModelConfig:
    """The ModelConfig of a checkpoint directory. Raises ModelLoadError naming the file and the key."""
    config = _read_json(directory / "config.json")
    generation_file = directory / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    try:
        _check_architecture(config)  # first: an unknown family may lack every key that is read below
        return from_hf(config, generation)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        cause = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelLoadError(f"{directory / 'config.json'}: {cause}") from error


def _check_architecture(hf: Json) -> None:
    try:
        model_class(architecture_of(hf))
    except ModelLoadError as error:
        if not hf.get("auto_map"):
            raise
        raise ModelLoadError(f"{error}; the code that its directory brings is never run", fix=error.fix) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist", fix="name a directory with a published checkpoint") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return value


def from_hf(hf: Json, generation: Json | None = None) -> ModelConfig:
    """ModelConfig of a parsed config.json. KeyError, TypeError or ValueError where a needed key is absent or wrong."""
    architecture = architecture_of(hf)
    generation = generation or {}
    heads = integer(hf, "num_attention_heads")
    hidden = integer(hf, "hidden_size")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": integer(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer(hf, "intermediate_size"),
        "num_layers": integer(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": optional_integer(hf, "num_key_value_heads", heads),
        "head_dim": optional_integer(hf, "head_dim", hidden // heads),
        "max_position_embeddings": integer(hf, "max_position_embeddings"),
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "out_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "activation": _activation(hf),
        "eos_token_ids": _eos_token_ids(generation.get("eos_token_id"), hf.get("eos_token_id")),
        "bos_token_id": optional_integer(generation, "bos_token_id", hf.get("bos_token_id")),
        "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
        "generation": _generation_defaults(generation),
    }
    if not rope_by_layer_type(hf):
        fields["rope"] = rope_config(hf, fields["head_dim"])
    fields |= FAMILIES.get(architecture, no_changes)(hf, fields)
    config = ModelConfig(**fields, weight_block=_weight_block(hf))
    _check(config)
    return config


SERVED_QUANTIZATION = ("fp8", "mxfp4", "modelopt", "compressed-tensors")


def _weight_block(hf: Json) -> tuple[int, int] | None:
    """Rows and columns that share an FP8 scale; ValueError for a quantization that cannot be read."""
    quantization = hf.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method is not None and method not in SERVED_QUANTIZATION:
        raise ValueError(f"quantization {method!r} is not supported (supported: FP8 weights, MXFP4 of gpt-oss)")
    if quantization.get("quant_algo") not in (None, "FP8"):
        raise ValueError(f"quantization {quantization['quant_algo']!r} is not supported (supported: FP8 weights)")
    block = quantization.get("weight_block_size")
    return None if block is None else (int(block[0]), int(block[1]))


def _check(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} attention heads are no multiple of {config.num_kv_heads} kv heads")
    if len(config.windows) != config.num_layers:
        raise ValueError(f"{len(config.windows)} layer types are given for {config.num_layers} layers")
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be positive, not {getattr(config, name)}")


def _activation(hf: Json) -> str:
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
    known |= {"gelu": "gelu"}  # an encoder's
    if name not in known:
        raise ValueError(f"activation {name!r} is not supported (supported: {', '.join(sorted(known))})")
    return known[name]


def _eos_token_ids(*candidates: Any) -> tuple[int, ...]:
    """The first given value, which may be an id or a list of ids."""
    for value in candidates:
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(int(v) for v in value)
    return ()


def _generation_defaults(generation: Json) -> GenerationDefaults:
    if generation.get("do_sample") is False:  # the values that follow are then not meant to be used
        return GenerationDefaults()

    def number(key: str) -> float | None:
        return None if generation.get(key) is None else float(generation[key])

    top_k = generation.get("top_k")
    return GenerationDefaults(
        temperature=number("temperature"),
        top_k=None if top_k is None else int(top_k),
        top_p=number("top_p"),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )
