"""The architectures that can be served, by the name that config.json gives them."""

from __future__ import annotations

from types import MappingProxyType

from jaxserve.errors import ModelLoadError
from jaxserve.models.decoder import CausalLM
from jaxserve.models.families.bert import BertModel
from jaxserve.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from jaxserve.models.families.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM
from jaxserve.models.families.gpt_oss import GptOssForCausalLM
from jaxserve.models.families.llama import LlamaForCausalLM
from jaxserve.models.families.mistral import MistralForCausalLM
from jaxserve.models.families.mixtral import MixtralForCausalLM
from jaxserve.models.families.olmo2 import Olmo2ForCausalLM
from jaxserve.models.families.olmo3 import Olmo3ForCausalLM
from jaxserve.models.families.phi3 import Phi3ForCausalLM
from jaxserve.models.families.qwen2 import Qwen2ForCausalLM
from jaxserve.models.families.qwen3 import Qwen3ForCausalLM
from jaxserve.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxserve.models.families.smollm3 import SmolLM3ForCausalLM

ModelClass = type[CausalLM] | type[BertModel]

ARCHITECTURES: MappingProxyType[str, ModelClass] = MappingProxyType(
    {
        "BertModel": BertModel,
        "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
        "Gemma2ForCausalLM": Gemma2ForCausalLM,
        "Gemma3ForCausalLM": Gemma3ForCausalLM,
        "GptOssForCausalLM": GptOssForCausalLM,
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "MixtralForCausalLM": MixtralForCausalLM,
        "Olmo2ForCausalLM": Olmo2ForCausalLM,
        "Olmo3ForCausalLM": Olmo3ForCausalLM,
        "Phi3ForCausalLM": Phi3ForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
        "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
    }
)


def model_class(architecture: str) -> ModelClass:
    """The module class of an architecture. Raises ModelLoadError listing the supported ones."""
    if architecture not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"architecture {architecture!r} is not supported", fix=f"serve one of: {supported}")
    return ARCHITECTURES[architecture]
