"""A published config.json (and generation_config.json), translated into ModelConfig.

The one place that knows Hugging Face's keys and each family's unwritten defaults: a published file leaves out what
equals the default of its class. Reads JSON only; never imports or runs anything from the checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import GenerationDefaults, ModelConfig
from jaxserve.models.registry import model_class
from jaxserve.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, Scaling, YarnScaling

Json = Mapping[str, Any]


def read_config(directory: Path) -> ModelConfig:
    """The ModelConfig of a checkpoint directory. Raises ModelLoadError naming the file and the key."""
    config = _read_json(directory / "config.json")
    generation_file = directory / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    try:
        model_class(architecture_of(config))  # first: an unknown family may lack every key that is read below
        return from_hf(config, generation)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        cause = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelLoadError(f"{directory / 'config.json'}: {cause}") from error


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
    heads = _int(hf, "num_attention_heads")
    hidden = _int(hf, "hidden_size")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": _int(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _int(hf, "intermediate_size"),
        "num_layers": _int(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": _optional(hf, "num_key_value_heads", heads),
        "head_dim": _optional(hf, "head_dim", hidden // heads),
        "max_position_embeddings": _int(hf, "max_position_embeddings"),
        "norm_eps": float(hf["rms_norm_eps"]),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "out_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "activation": _activation(hf),
        "eos_token_ids": _eos_token_ids(generation.get("eos_token_id"), hf.get("eos_token_id")),
        "bos_token_id": _optional(generation, "bos_token_id", hf.get("bos_token_id")),
        "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
        "generation": _generation_defaults(generation),
    }
    fields["rope"] = _rope(hf, fields["head_dim"])
    fields |= _FAMILIES.get(architecture, _no_changes)(hf, fields)
    config = ModelConfig(**fields)
    _check(config)
    return config


def architecture_of(hf: Json) -> str:
    """The one architecture name of a parsed config.json."""
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError("'architectures' must be a list with the architecture's name")
    return names[0]


def _check(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} attention heads are no multiple of {config.num_kv_heads} kv heads")
    if len(config.windows) != config.num_layers:
        raise ValueError(f"{len(config.windows)} layer types are given for {config.num_layers} layers")
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be positive, not {getattr(config, name)}")


def _int(hf: Json, key: str) -> int:
    value = hf[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key!r} must be an integer, not {value!r}")
    return value


def _optional(hf: Json, key: str, default: Any) -> Any:
    """The key's integer, or the default where the key is absent or null."""
    return default if hf.get(key) is None else _int(hf, key)


def _activation(hf: Json) -> str:
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
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


# --- rope ------------------------------------------------------------------------------------------------------


def _rope(hf: Json, head_dim: int, parameters: Json | None = None) -> RopeConfig:
    """From `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`, which holds both."""
    found: Json = parameters or hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = found.get("rope_theta", hf.get("rope_theta", 10000.0))
    partial = found.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    return RopeConfig(
        rotary_dim=int(head_dim * float(partial)),
        theta=float(theta),
        scaling=_scaling(hf, found),
    )


def _scaling(hf: Json, p: Json) -> Scaling | None:
    kind = p.get("rope_type", p.get("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(float(p["factor"]))
        case "llama3":
            return Llama3Scaling(
                float(p["factor"]),
                float(p["low_freq_factor"]),
                float(p["high_freq_factor"]),
                int(p["original_max_position_embeddings"]),
            )
        case "yarn":
            return _yarn(hf, p)
        case "longrope" | "su":
            return _longrope(hf, p)
    raise ValueError(f"rope scaling {kind!r} is not supported (supported: linear, llama3, yarn, longrope)")


def _yarn(hf: Json, p: Json) -> YarnScaling:
    original = p.get("original_max_position_embeddings") or hf["max_position_embeddings"]
    factor = float(p.get("factor") or hf["max_position_embeddings"] / original)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        attention = float(p["attention_factor"])
    elif p.get("mscale") and p.get("mscale_all_dim"):
        attention = mscale(float(p["mscale"])) / mscale(float(p["mscale_all_dim"]))
    else:
        attention = mscale(1.0)
    return YarnScaling(
        factor=factor,
        original_max_position=int(original),
        beta_fast=float(p.get("beta_fast") or 32.0),
        beta_slow=float(p.get("beta_slow") or 1.0),
        attention_factor=attention,
        truncate=bool(p.get("truncate", True)),
    )


def _longrope(hf: Json, p: Json) -> LongRopeScaling:
    longest = _int(hf, "max_position_embeddings")
    original = int(hf.get("original_max_position_embeddings") or p.get("original_max_position_embeddings") or longest)
    factor = longest / original if longest > original else float(p.get("factor") or 1.0)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factor=tuple(float(f) for f in p["short_factor"]),
        long_factor=tuple(float(f) for f in p["long_factor"]),
        original_max_position=original,
        attention_factor=float(p.get("attention_factor") or default),
        long=longest > original,
    )


# --- what each family adds or leaves out -------------------------------------------------------------------------

Changes = Callable[[Json, dict[str, Any]], dict[str, Any]]


def _no_changes(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {}


def _qwen2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "out_bias": False, "layer_windows": _qwen_windows(hf, fields)}


def _qwen3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    head_dim = _optional(hf, "head_dim", 128)
    return {
        "head_dim": head_dim,
        "rope": _rope(hf, head_dim),
        "qk_norm": "head",
        "layer_windows": _qwen_windows(hf, fields),
    }


def _qwen_windows(hf: Json, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's window is off unless asked for, and then leaves the first `max_window_layers` layers full."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window") is None:
        return ()
    full = _optional(hf, "max_window_layers", 28)
    window = _int(hf, "sliding_window")
    return _windows_by_type(hf, window) or tuple(window if i >= full else None for i in range(fields["num_layers"]))


def _windows_by_type(hf: Json, window: int | None) -> tuple[int | None, ...]:
    types = hf.get("layer_types") or ()
    return tuple(window if t == "sliding_attention" else None for t in types)


_FAMILIES: dict[str, Changes] = {
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
