"""The architectures that can be served, by the name that config.json gives them."""

from __future__ import annotations

from types import MappingProxyType

from jaxserve.errors import ModelLoadError
from jaxserve.models.decoder import CausalLM
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.qwen2 import Qwen2ForCausalLM
from jaxserve.models.qwen3 import Qwen3ForCausalLM

ARCHITECTURES: MappingProxyType[str, type[CausalLM]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
    }
)


def model_class(architecture: str) -> type[CausalLM]:
    """The module class of an architecture. Raises ModelLoadError listing the supported ones."""
    if architecture not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"architecture {architecture!r} is not supported", fix=f"serve one of: {supported}")
    return ARCHITECTURES[architecture]
