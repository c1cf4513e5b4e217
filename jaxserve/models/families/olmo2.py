"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms after attention and MLP instead of before, and over all heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer
from jaxserve.models.layers import MLP, AttendFn, Attention, Cache, LinearFn, RMSNorm, RopeTable


class Olmo2Layer(Layer):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.mlp = MLP(config, dtype)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config, dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: LinearFn
    ) -> tuple[jax.Array, Cache]:
        out, cache = self.self_attn(x, rope, cache, attend, linear)
        x = x + self.post_attention_layernorm(out)
        return x + self.post_feedforward_layernorm(self.mlp(x, linear)), cache


class Olmo2ForCausalLM(CausalLM):
    """The config has `qk_norm="full"`."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return Olmo2Layer(config, dtype)
