"""Mistral (https://arxiv.org/abs/2310.06825): Llama's layer, with a sliding window where the config gives one."""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.layers import MLP, Attention


class MistralForCausalLM(CausalLM):
    """The window is in `layer_windows`; the attention function applies it."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), MLP(config, dtype))
