"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): Llama's layer with biases on q, k and v."""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.layers import MLP, Attention


class Qwen2ForCausalLM(CausalLM):
    """The config has `qkv_bias`."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), MLP(config, dtype))
