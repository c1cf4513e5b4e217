"""Phi-3, Phi-3.5 and Phi-4-mini (https://arxiv.org/abs/2404.14219): Llama's layer from packed tensors.

Heads may be rotated in part, and LongRoPE has one set of factors for short contexts and one for long.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.layers import MLP, Attention


class Phi3ForCausalLM(CausalLM):
    """The config has `packed_projections`."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), MLP(config, dtype))
