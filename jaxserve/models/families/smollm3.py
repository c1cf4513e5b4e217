"""SmolLM3: Llama's layer, every fourth one without positions. (SmolLM and SmolLM2 are Llama itself.)"""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.layers import MLP, Attention


class SmolLM3ForCausalLM(CausalLM):
    """The config's `rope_layers` say which layers rotate."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), MLP(config, dtype))
