"""OLMo 2 (https://arxiv.org/abs/2501.00656) and OLMo 3 (https://arxiv.org/abs/2512.13961).

Norms follow attention and MLP instead of preceding them, and the query and key norms run over all heads at once.
OLMo 3 has a sliding window in three of four layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import Json, optional_integer, ropes_by_layer_type, windows_but_every
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PostNormLayer
from jaxserve.models.family import Family


class OlmoForCausalLM(CausalLM):
    """Layers with norms after each block."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PostNormLayer(config, dtype)


def _olmo2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"qk_norm": "full"}


def _olmo3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of OLMo 3. Every fourth layer has full attention; only these layers scale the rotation."""
    window = optional_integer(hf, "sliding_window", 4096)
    rope, local = ropes_by_layer_type(hf, fields["head_dim"])
    return {
        "qk_norm": "full",
        "layer_windows": windows_but_every(hf, window, fields["num_layers"], 4),
        "rope": rope,
        "local_rope": local or dataclasses.replace(rope, scaling=None),
    }


FAMILIES = (
    Family("Olmo2ForCausalLM", OlmoForCausalLM, _olmo2),
    Family("Olmo3ForCausalLM", OlmoForCausalLM, _olmo3, rope_theta=500000.0),
)
