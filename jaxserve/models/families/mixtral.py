"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral's attention, and experts instead of every MLP."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import Json, optional_integer, window_everywhere
from jaxserve.models.config import ModelConfig, MoEConfig
from jaxserve.models.decoder import CausalLM, Layer
from jaxserve.models.family import Family
from jaxserve.models.layers import AttendFn, Attention, Cache, RMSNorm, RopeTable
from jaxserve.models.moe import ExpertRouter, Experts
from jaxserve.ops.linear import Products


class MixtralMoE(nnx.Module):
    """The part that checkpoints call `block_sparse_moe`. w1 is gate, w3 up, w2 down."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        assert config.moe is not None
        self.gate = ExpertRouter(config, config.moe, dtype)
        self.experts = Experts(config, config.moe, dtype, names=("w1", "w3", "w2"))

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        """Run the block: x [T, D] -> [T, D]."""
        return self.experts(x, self.gate(x), linear)


class MixtralLayer(Layer):
    """A pre-norm layer whose feed-forward has the name block_sparse_moe."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.block_sparse_moe = MixtralMoE(config, dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        out, cache = self.self_attn(self.input_layernorm(x), rope, cache, attend, linear)
        x = x + out
        return x + self.block_sparse_moe(self.post_attention_layernorm(x), linear), cache


class MixtralForCausalLM(CausalLM):
    """Softmax router; the weights of the chosen experts are divided by their sum."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return MixtralLayer(config, dtype)


def _mixtral(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    experts = MoEConfig(
        num_experts=optional_integer(hf, "num_local_experts", 8),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 2),
        ffn=fields["intermediate_size"],
        sparse_layers=(True,) * fields["num_layers"],
    )
    return {"qkv_bias": False, "out_bias": False, "moe": experts, "layer_windows": window_everywhere(hf, fields)}


FAMILIES = (Family("MixtralForCausalLM", MixtralForCausalLM, _mixtral, rope_theta=1e6),)
