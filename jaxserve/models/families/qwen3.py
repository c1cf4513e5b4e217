"""Qwen3, dense (https://arxiv.org/abs/2505.09388): Llama's layer with an RMSNorm over each query and key head."""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.layers import MLP, Attention


class Qwen3ForCausalLM(CausalLM):
    """The config has `qk_norm="head"`."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), MLP(config, dtype))
