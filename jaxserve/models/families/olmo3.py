"""OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2 with a sliding window in three of four layers."""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer
from jaxserve.models.families.olmo2 import Olmo2Layer


class Olmo3ForCausalLM(CausalLM):
    """The window and its own rotation, which is never scaled, are the config's."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return Olmo2Layer(config, dtype)
