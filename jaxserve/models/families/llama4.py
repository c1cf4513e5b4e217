"""Llama 4 as text: Scout and Maverick.

Most layers rotate, and a token sees its chunk of 8,192 tokens. Every fourth layer has no positions and sees all; it
scales a query by its position instead (https://arxiv.org/abs/2501.19399). A token has one routed expert, whose input,
not output, is multiplied by the router's weight, and a shared expert. Scout divides each query and key head by its RMS
in layers that rotate. In Maverick every other layer has a dense MLP.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import Json, boolean, number, optional_integer, rope_config
from jaxserve.models.config import ModelConfig, MoEConfig, MoENames
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.family import Family, Nested
from jaxserve.models.layers import Attention
from jaxserve.models.moe import feed_forward
from jaxserve.models.rope import QueryScale, RopeConfig


class Llama4ForCausalLM(CausalLM):
    """Pre-norm layers, of which those without rotation have no norm of queries and keys either."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        of_attention = config if config.rope_layers[index] else config.replace(qk_norm="none")
        attention, mlp = Attention(of_attention, dtype), feed_forward(config, index, dtype)
        return PreNormLayer(config, dtype, attention, mlp, block="feed_forward")


def _llama4(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers, interval = fields["num_layers"], optional_integer(hf, "no_rope_layer_interval", 4)
    by_place = [(i + 1) % interval != 0 for i in range(layers)]
    rotated = tuple(bool(v) for v in hf.get("no_rope_layers") or by_place)  # despite its name, 1 is a layer with rope
    chunk = optional_integer(hf, "attention_chunk_size", None if "attention_chunk_size" in hf else 8192)
    types = hf.get("layer_types") or ["chunked_attention" if each else "full_attention" for each in rotated]
    scale = QueryScale(number(hf, "attn_scale", 0.1), optional_integer(hf, "floor_scale", 8192), shift=1)
    step = optional_integer(hf, "interleave_moe_layer_step", 1)
    sparse = hf.get("moe_layers")
    sparse = set(range(step - 1, layers, step) if sparse is None else sparse)
    experts = MoEConfig(
        num_experts=optional_integer(hf, "num_local_experts", 16),
        experts_per_token=optional_integer(hf, "num_experts_per_tok", 1),
        ffn=fields["intermediate_size"],
        sparse_layers=tuple(i in sparse for i in range(layers)),
        router="sigmoid",
        normalize=False,
        weights_input=True,
        shared_ffn=fields["intermediate_size"],
        names=MoENames("feed_forward", "router", shared="shared_expert"),
    )
    head_dim = optional_integer(hf, "head_dim", 128)
    return {
        "intermediate_size": optional_integer(hf, "intermediate_size_mlp", 16384),
        "head_dim": head_dim,
        "rope": dataclasses.replace(rope_config(hf, head_dim), interleaved=True),
        "rope_layers": rotated,
        "unrotated": RopeConfig(0, query_scale=scale) if hf.get("attn_temperature_tuning", True) else None,
        "layer_chunks": tuple(chunk if kind == "chunked_attention" else None for kind in types),
        "qk_norm": "over_rms" if boolean(hf, "use_qk_norm", True) else "none",
        "moe": experts,
        "packed_experts": "columns",
    }


FAMILIES = (
    Family("Llama4ForCausalLM", Llama4ForCausalLM, _llama4, rope_theta=500000.0),
    Nested(("Llama4ForConditionalGeneration",), {"llama4_text": "Llama4ForCausalLM"}),
)
