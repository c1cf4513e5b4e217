"""Llama (https://arxiv.org/abs/2407.21783), and the families that differ from it only in their config.

Mistral (https://arxiv.org/abs/2310.06825): a sliding window.
Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): biases on q, k and v.
Qwen3, dense (https://arxiv.org/abs/2505.09388): an RMSNorm over each query and key head.
SmolLM3: every fourth layer has no positions. (SmolLM and SmolLM2 are Llama itself.)
Phi-3, Phi-3.5 and Phi-4-mini (https://arxiv.org/abs/2404.14219): packed tensors, partly rotated heads, LongRoPE.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import (
    Json,
    boolean,
    head_dim_or,
    integer,
    optional_integer,
    window_everywhere,
    windows_by_type,
)
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.family import Family
from jaxserve.models.layers import MLP, Attention


class LlamaForCausalLM(CausalLM):
    """Pre-norm layers with grouped-query attention, rotary positions and SwiGLU."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return PreNormLayer(config, dtype, Attention(config, dtype), MLP(config, dtype))


def _mistral(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": False,
        "out_bias": False,
        "layer_windows": window_everywhere({"sliding_window": 4096, **hf}, fields),
    }


def _phi3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"packed_projections": True, "layer_windows": window_everywhere(hf, fields)}


def _qwen2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "out_bias": False, "layer_windows": _qwen_windows(hf, fields)}


def _qwen3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return head_dim_or(hf, 128) | {"qk_norm": "head", "layer_windows": _qwen_windows(hf, fields)}


def _qwen_windows(hf: Json, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the windows of Qwen: none unless `use_sliding_window`, and then none in the first `max_window_layers`."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window") is None:
        return ()
    full = optional_integer(hf, "max_window_layers", 28)
    window = integer(hf, "sliding_window")
    by_place = tuple(window if i >= full else None for i in range(fields["num_layers"]))
    return windows_by_type(hf, window) or by_place


def _smollm3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    interval = optional_integer(hf, "no_rope_layer_interval", 4)
    by_place = [(i + 1) % interval != 0 for i in range(fields["num_layers"])]
    rotated = tuple(bool(v) for v in hf.get("no_rope_layers") or by_place)  # despite its name, 1 is a layer with rope
    window = integer(hf, "sliding_window") if hf.get("use_sliding_window") and hf.get("sliding_window") else None
    windows = windows_by_type(hf, window) or tuple(None if r else window for r in rotated)
    return {
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", True),
        "rope_layers": rotated,
        "layer_windows": windows if window is not None else (),
    }


FAMILIES = (
    Family("LlamaForCausalLM", LlamaForCausalLM),
    Family("MistralForCausalLM", LlamaForCausalLM, _mistral),
    Family("Phi3ForCausalLM", LlamaForCausalLM, _phi3),
    Family("Qwen2ForCausalLM", LlamaForCausalLM, _qwen2),
    Family("Qwen3ForCausalLM", LlamaForCausalLM, _qwen3),
    Family("SmolLM3ForCausalLM", LlamaForCausalLM, _smollm3, rope_theta=2e6),
)
