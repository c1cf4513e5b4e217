"""gpt-oss (https://arxiv.org/abs/2508.10925): attention sinks, alternating windows, biased experts, clamped SwiGLU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.layers import Attention, LinearFn
from jaxserve.models.moe import Experts, Router


class GptOssMLP(nnx.Module):
    """The router has a bias and is called `router`; the experts come packed, in MXFP4 or bfloat16."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        assert config.moe is not None
        self.router = Router(config, config.moe, dtype)
        self.experts = Experts(config, config.moe, dtype)

    def __call__(self, x: jax.Array, linear: LinearFn) -> jax.Array:
        """[T, D] -> [T, D]."""
        return self.experts(x, *self.router(x))


class GptOssForCausalLM(CausalLM):
    """The config has `attention_sinks` and a router of kind "topk_softmax"."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), GptOssMLP(config, dtype))
