"""The keys of a published config.json that several families share: integers with defaults, the rotation.

Part of hf_config.py's job, which is the door; hf_families.py has what each family adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, Scaling, YarnScaling

Json = Mapping[str, Any]


def architecture_of(hf: Json) -> str:
    """The one architecture name of a parsed config.json."""
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError("'architectures' must be a list with the architecture's name")
    return names[0]


def integer(hf: Json, key: str) -> int:
    value = hf[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key!r} must be an integer, not {value!r}")
    return value


def optional_integer(hf: Json, key: str, default: Any) -> Any:
    """The key's integer, or the default where the key is absent or null."""
    return default if hf.get(key) is None else integer(hf, key)


_DEFAULT_THETA = {
    "Gemma3ForCausalLM": 1e6,
    "GptOssForCausalLM": 150000.0,
    "MixtralForCausalLM": 1e6,
    "Olmo3ForCausalLM": 500000.0,
    "SmolLM3ForCausalLM": 2e6,
}


def rope_config(hf: Json, head_dim: int, parameters: Json | None = None) -> RopeConfig:
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
    longest = integer(hf, "max_position_embeddings")
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
