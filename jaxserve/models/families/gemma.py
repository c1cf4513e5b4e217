"""Gemma 2 (https://arxiv.org/abs/2408.00118) and Gemma 3 text (https://arxiv.org/abs/2503.19786).

Both have norms before and after each block with weights around zero, scaled embeddings, GeGLU, and layers with and
without a sliding window. Gemma 2 applies soft caps to scores and logits, and every other layer has a window. Gemma 3
normalizes queries and keys, has five window layers per full layer, and rotates window layers with another base.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import (
    Json,
    boolean,
    head_dim_or,
    number,
    optional_integer,
    ropes_by_layer_type,
    windows_but_every,
)
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, SandwichLayer
from jaxserve.models.family import Family, Nested
from jaxserve.models.rope import RopeConfig


class GemmaForCausalLM(CausalLM):
    """Layers with norms on both sides of each block."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        """Make a layer."""
        return SandwichLayer(config, dtype)


def _gemma(hf: Json, fields: dict[str, Any], pattern: int) -> dict[str, Any]:
    """Return the fields of Gemma 2 and 3. Every `pattern`-th layer has full attention, the others a sliding window."""
    window = optional_integer(hf, "sliding_window", optional_integer(hf, "sliding_window_attention_size", 4096))
    return head_dim_or(hf, 256) | {
        "activation": "gelu_tanh",
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", True),
        "norm_offset": 1.0,
        "embed_scale": fields["hidden_size"] ** 0.5,
        "attention_scale": number(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        "layer_windows": windows_but_every(hf, window, fields["num_layers"], pattern),
    }


def _gemma2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    caps = {"attention_soft_cap": "attn_logit_softcapping", "logit_soft_cap": "final_logit_softcapping"}
    defaults = {"attention_soft_cap": 50.0, "logit_soft_cap": 30.0}
    return _gemma(hf, fields, 2) | {
        name: number(hf, key, None if key in hf else defaults[name]) for name, key in caps.items()
    }


def _gemma3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    if hf.get("use_bidirectional_attention"):
        raise ValueError("'use_bidirectional_attention' is not supported")
    changes = _gemma(hf, fields, optional_integer(hf, "sliding_window_pattern", 6))
    rope, local = ropes_by_layer_type(hf, changes["head_dim"])
    local = local or RopeConfig(changes["head_dim"], number(hf, "rope_local_base_freq", 10000.0))
    return changes | {"qk_norm": "head", "rope": rope, "local_rope": local}


FAMILIES = (
    Family("Gemma2ForCausalLM", GemmaForCausalLM, _gemma2),
    Family("Gemma3ForCausalLM", GemmaForCausalLM, _gemma3, rope_theta=1e6),
    Nested(("Gemma3ForConditionalGeneration",), {"gemma3_text": "Gemma3ForCausalLM"}),
)
