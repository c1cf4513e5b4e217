"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): Qwen3's attention; experts in the layers that the config names."""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.layers import Attention
from jaxserve.models.moe import feed_forward


class Qwen3MoeForCausalLM(CausalLM):
    """The config has `qk_norm="head"` and a softmax router."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), feed_forward(config, index, dtype))
