"""Gemma 2 (https://arxiv.org/abs/2408.00118) and Gemma 3 text (https://arxiv.org/abs/2503.19786).

Common: norms on both sides of each block with weights around zero, scaled embeddings, GeGLU, layers with and without a
window. Gemma 2 caps scores and logits softly; Gemma 3 norms queries and keys and rotates its windowed layers by
another base. All of it is in the config.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, SandwichLayer


class Gemma2ForCausalLM(CausalLM):
    """Soft caps, every other layer with a window."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return SandwichLayer(config, dtype)


class Gemma3ForCausalLM(CausalLM):
    """Query and key norms, five windowed layers to one full."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return SandwichLayer(config, dtype)
