"""Command R (Cohere) and Command R7B, Command A (Cohere 2): attention and MLP read one norm, and are added at once.

The norm is a LayerNorm without bias, the rotation is interleaved, and logits are scaled. Cohere 2 has a sliding window
in three of four layers, and only these have positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import Json, boolean, number, optional_integer, windows_but_every
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer
from jaxserve.models.family import Family
from jaxserve.models.layers import MLP, AttendFn, Attention, Cache, RopeTable, layer_norm
from jaxserve.ops.linear import Products


class ParallelLayer(Layer):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.input_layernorm = layer_norm(config, dtype)
        self.self_attn = Attention(config, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        normed = self.input_layernorm(x)
        out, cache = self.self_attn(normed, rope, cache, attend, linear)
        return x + out + self.mlp(normed, linear), cache


class CohereForCausalLM(CausalLM):
    """Layers whose blocks are parallel."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return ParallelLayer(config, dtype)


def _cohere(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope": dataclasses.replace(fields["rope"], interleaved=True),
        "norm": "layer",
        "norm_eps": number(hf, "layer_norm_eps", 1e-5),
        "logit_scale": number(hf, "logit_scale", 0.0625),
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", True),
        "mlp_bias": False,
    }


def _cohere2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    window = optional_integer(hf, "sliding_window", None if "sliding_window" in hf else 4096)
    interval = optional_integer(hf, "sliding_window_pattern", 4)
    windows = windows_but_every(hf, window, fields["num_layers"], interval)
    return _cohere(hf, fields) | {
        "layer_windows": windows,
        "rope_layers": tuple(each is not None for each in windows),
    }


FAMILIES = (
    Family("CohereForCausalLM", CohereForCausalLM, _cohere, rope_theta=500000.0),
    Family("Cohere2ForCausalLM", CohereForCausalLM, _cohere2),
)
