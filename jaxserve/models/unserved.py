"""Models that are often asked for and not served: why, and what to serve instead.

The loader, `plan` and `doctor` read this before anything is downloaded, so nothing here imports JAX. A family that
becomes served leaves this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxserve.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Unserved:
    """A family that is not served.

    models: the published names. architectures: in config.json. why: the parts of its layers that are missing here
    instead: a model for the same use that is served, and its architecture
    """

    models: str
    architectures: tuple[str, ...]
    why: str
    instead: tuple[str, str]


_GPT_OSS = ("gpt-oss-120b", "GptOssForCausalLM")
_QWEN = ("Qwen3-30B-A3B", "Qwen3MoeForCausalLM")
_DEEPSEEK = ("DeepSeek-V3.1", "DeepseekV3ForCausalLM")
_KIMI = ("Kimi-K2-Instruct", "DeepseekV3ForCausalLM")

FAMILIES = (
    Unserved(
        "DeepSeek-V4",
        ("DeepseekV4ForCausalLM",),
        "compressed and sparse attention, and four residual streams",
        _DEEPSEEK,
    ),
    Unserved("DeepSeek-V3.2", ("DeepseekV32ForCausalLM",), "sparse attention by an indexer", _DEEPSEEK),
    Unserved("GLM-5, 5.1 and 5.2", ("GlmMoeDsaForCausalLM",), "sparse attention by an indexer", _DEEPSEEK),
    Unserved(
        "GLM-5.3-Flash",
        ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"),
        "delta attention beside sparse attention",
        _GPT_OSS,
    ),
    Unserved(
        "Qwen4-Exp and Qwen3.8-Flash-Next",
        ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        "sparse attention, several residual streams and a table of n-grams",
        _QWEN,
    ),
    Unserved(
        "Kimi-K3",
        ("KimiK3ForConditionalGeneration", "KimiK3ForCausalLM"),
        "delta attention with a bounded gate beside latent attention",
        _KIMI,
    ),
    Unserved(
        "MiniMax M3",
        (
            *("MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM"),
            "MiniMaxM3SparseForConditionalGeneration",
        ),
        "block-sparse attention",
        _GPT_OSS,
    ),
    Unserved(
        "Mistral Large 4",
        ("MistralLarge4ForConditionalGeneration",),
        "sparse attention by an indexer, and layers that read other layers' cache",
        _DEEPSEEK,
    ),
    Unserved(
        "Inkling",
        tuple(f"{name}For{kind}" for name in ("Inkling", "Inkling2", "Inkling2Loop")
              for kind in ("CausalLM", "ConditionalGeneration")),
        "short convolutions",
        _GPT_OSS,
    ),
    Unserved("Hy4", ("HYV4ForCausalLM", "HYV4VLForConditionalGeneration"), "sparse attention by an indexer", _DEEPSEEK),
)  # fmt: skip
BY_ARCHITECTURE = MappingProxyType({name: family for family in FAMILIES for name in family.architectures})


def refuse_unserved(config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError if a parsed config.json is of a family of this table."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in BY_ARCHITECTURE:
            raise refusal(name)


def refusal(architecture: str) -> ModelLoadError:
    """Return the error for an architecture of this table."""
    family = BY_ARCHITECTURE[architecture]
    why = f"{family.models} ({architecture}) is not served: its layers have {family.why}"
    name, other = family.instead
    return ModelLoadError(why, fix=f"serve {name} ({other}) or another model of docs/models.md")
