"""A published config.json (and generation_config.json), translated into ModelConfig.

The one place that knows Hugging Face's keys and each family's unwritten defaults: a published file leaves out what
equals the default of its class. Reads JSON only; never imports or runs anything from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import GenerationDefaults, LatentConfig, ModelConfig, MoEConfig
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
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
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
    if not _by_type(hf):
        fields["rope"] = _rope(hf, fields["head_dim"])
    fields |= _FAMILIES.get(architecture, _no_changes)(hf, fields)
    config = ModelConfig(**fields, weight_block=_weight_block(hf))
    _check(config)
    return config


def architecture_of(hf: Json) -> str:
    """The one architecture name of a parsed config.json."""
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError("'architectures' must be a list with the architecture's name")
    return names[0]


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


_DEFAULT_THETA = {
    "Gemma3ForCausalLM": 1e6,
    "GptOssForCausalLM": 150000.0,
    "MixtralForCausalLM": 1e6,
    "SmolLM3ForCausalLM": 2e6,
}


def _rope(hf: Json, head_dim: int, parameters: Json | None = None) -> RopeConfig:
    """From `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`, which holds both."""
    found: Json = parameters or hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    default_theta = _DEFAULT_THETA.get(architecture_of(hf), 10000.0)
    theta = found.get("rope_theta", hf.get("rope_theta", default_theta))
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


def _mistral(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": False,
        "out_bias": False,
        "layer_windows": _window_everywhere({"sliding_window": 4096, **hf}, fields),
    }


def _mixtral(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    experts = MoEConfig(
        num_experts=_optional(hf, "num_local_experts", 8),
        experts_per_token=_optional(hf, "num_experts_per_tok", 2),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
    )
    return {"qkv_bias": False, "out_bias": False, "moe": experts, "layer_windows": _window_everywhere(hf, fields)}


def _qwen2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "out_bias": False, "layer_windows": _qwen_windows(hf, fields)}


def _qwen3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return _head_dim(hf, 128) | {"qk_norm": "head", "layer_windows": _qwen_windows(hf, fields)}


def _qwen3_moe(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    dense, step = set(hf.get("mlp_only_layers") or ()), _optional(hf, "decoder_sparse_step", 1)
    experts = MoEConfig(
        num_experts=_optional(hf, "num_experts", 128),
        experts_per_token=_optional(hf, "num_experts_per_tok", 8),
        ffn=_optional(hf, "moe_intermediate_size", 768),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(fields["num_layers"])),
        normalize=bool(hf.get("norm_topk_prob", False)),
    )
    windows = _window_everywhere(hf, fields) if hf.get("use_sliding_window") else ()
    return {"qk_norm": "head", "moe": experts, "layer_windows": windows}


def _gemma(hf: Json, fields: dict[str, Any], pattern: int) -> dict[str, Any]:
    """Every `pattern`-th layer is full, the others have the window."""
    window = _optional(hf, "sliding_window", _optional(hf, "sliding_window_attention_size", 4096))
    by_place = tuple(window if (i + 1) % pattern else None for i in range(fields["num_layers"]))
    return _head_dim(hf, 256) | {
        "activation": "gelu_tanh",
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", True)),
        "norm_offset": 1.0,
        "embed_scale": fields["hidden_size"] ** 0.5,
        "attention_scale": float(hf.get("query_pre_attn_scalar") or 256) ** -0.5,
        "layer_windows": _windows_by_type(hf, window) or by_place,
    }


def _gemma2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    caps = {"attention_soft_cap": "attn_logit_softcapping", "logit_soft_cap": "final_logit_softcapping"}
    defaults = {"attention_soft_cap": 50.0, "logit_soft_cap": 30.0}
    return _gemma(hf, fields, 2) | {name: hf.get(key, defaults[name]) for name, key in caps.items()}


def _gemma3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    if hf.get("use_bidirectional_attention"):
        raise ValueError("'use_bidirectional_attention' is not supported")
    changes = _gemma(hf, fields, _optional(hf, "sliding_window_pattern", 6))
    by_type = hf.get("rope_parameters") or {}
    if "full_attention" in by_type:
        rope = _rope(hf, changes["head_dim"], by_type["full_attention"])
        local = _rope(hf, changes["head_dim"], by_type["sliding_attention"])
    else:
        rope = _rope(hf, changes["head_dim"])
        local = RopeConfig(changes["head_dim"], float(hf.get("rope_local_base_freq", 10000.0)))
    return changes | {"qk_norm": "head", "rope": rope, "local_rope": local}


def _phi3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"packed_projections": True, "layer_windows": _window_everywhere(hf, fields)}


def _olmo2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"qk_norm": "full"}


def _smollm3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    interval = _optional(hf, "no_rope_layer_interval", 4)
    by_place = [(i + 1) % interval != 0 for i in range(fields["num_layers"])]
    rotated = tuple(bool(v) for v in hf.get("no_rope_layers") or by_place)  # despite its name, 1 is a layer with rope
    window = _int(hf, "sliding_window") if hf.get("use_sliding_window") and hf.get("sliding_window") else None
    windows = _windows_by_type(hf, window) or tuple(None if r else window for r in rotated)
    return {
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", True)),
        "rope_layers": rotated,
        "layer_windows": windows if window is not None else (),
    }


def _gpt_oss(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    window = _optional(hf, "sliding_window", 128)
    by_place = tuple(window if (i + 1) % 2 else None for i in range(fields["num_layers"]))
    experts = MoEConfig(
        num_experts=_int(hf, "num_local_experts"),
        experts_per_token=_int(hf, "num_experts_per_tok"),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
        router="topk_softmax",
        router_bias=True,
    )
    quantized = (hf.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    bias = bool(hf.get("attention_bias", True))
    return _head_dim(hf, 64) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "layer_windows": _windows_by_type(hf, window) or by_place,
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "activation_limit": float(hf.get("swiglu_limit", 7.0)),
        "moe": experts,
        "packed_experts": "mxfp4" if quantized else "bfloat16",
    }


def _deepseek_v3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers, ffn = fields["num_layers"], _optional(hf, "moe_intermediate_size", 2048)
    latent = LatentConfig(
        kv_rank=_int(hf, "kv_lora_rank"),
        q_rank=_optional(hf, "q_lora_rank", None),
        nope_dim=_int(hf, "qk_nope_head_dim"),
        rope_dim=_int(hf, "qk_rope_head_dim"),
        v_dim=_int(hf, "v_head_dim"),
    )
    experts = MoEConfig(
        num_experts=_int(hf, "n_routed_experts"),
        experts_per_token=_int(hf, "num_experts_per_tok"),
        ffn=ffn,
        sparse_layers=tuple(i >= _optional(hf, "first_k_dense_replace", 3) for i in range(layers)),
        router="sigmoid",
        normalize=bool(hf.get("norm_topk_prob", True)),
        num_groups=_optional(hf, "n_group", 1),
        topk_groups=_optional(hf, "topk_group", 1),
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        shared_ffn=ffn * _optional(hf, "n_shared_experts", 0),
    )
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or hf.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError("only the router of DeepSeek-V3 is supported: sigmoid scores, topk_method noaux_tc")
    rope = dataclasses.replace(_rope(hf, latent.rope_dim), interleaved=bool(hf.get("rope_interleave", True)))
    predictors = range(layers, layers + _optional(hf, "num_nextn_predict_layers", 0))
    return {
        "head_dim": latent.nope_dim + latent.rope_dim,
        "rope": rope,
        "latent": latent,
        "attention_scale": (latent.nope_dim + latent.rope_dim) ** -0.5 * _yarn_score_factor(hf),
        "moe": experts,
        # layers that predict further tokens stand behind the model's own
        "ignored_tensors": tuple(rf"^model\.layers\.{i}\." for i in predictors),
    }


def _yarn_score_factor(hf: Json) -> float:
    """DeepSeek's YaRN scales the scores by the square of its mscale_all_dim."""
    p = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not p.get("mscale_all_dim") or float(p.get("factor", 1.0)) <= 1:
        return 1.0
    return (0.1 * float(p["mscale_all_dim"]) * math.log(float(p["factor"])) + 1.0) ** 2


def _head_dim(hf: Json, default: int) -> dict[str, Any]:
    """For families whose heads are not hidden over heads wide where nothing is said; the rotation goes with them."""
    head_dim = _optional(hf, "head_dim", default)
    return {"head_dim": head_dim, "rope": _rope(hf, head_dim) if not _by_type(hf) else None}


def _by_type(hf: Json) -> bool:
    return "full_attention" in (hf.get("rope_parameters") or {})


def _qwen_windows(hf: Json, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's window is off unless asked for, and then leaves the first `max_window_layers` layers full."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window") is None:
        return ()
    full = _optional(hf, "max_window_layers", 28)
    window = _int(hf, "sliding_window")
    by_place = tuple(window if i >= full else None for i in range(fields["num_layers"]))
    return _windows_by_type(hf, window) or by_place


def _window_everywhere(hf: Json, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """The same window in each layer; none where it is absent or no shorter than the context."""
    window = _optional(hf, "sliding_window", None)
    if window is None or window >= fields["max_position_embeddings"]:
        return ()
    return (window,) * fields["num_layers"]


def _windows_by_type(hf: Json, window: int | None) -> tuple[int | None, ...]:
    types = hf.get("layer_types") or ()
    return tuple(window if t == "sliding_attention" else None for t in types)


_FAMILIES: dict[str, Changes] = {
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SmolLM3ForCausalLM": _smollm3,
}
