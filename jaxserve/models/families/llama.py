"""Llama 2, 3, 3.1, 3.2 and 3.3 (https://arxiv.org/abs/2407.21783), and what differs from it in config.json alone."""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.layers import MLP, Attention


class LlamaForCausalLM(CausalLM):
    """Pre-norm layers with grouped-query attention, rotary positions and SwiGLU."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), MLP(config, dtype))
