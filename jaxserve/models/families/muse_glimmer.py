"""Muse Glimmer as text.

A layer has norms on both sides of each block, as in Gemma 3, with another epsilon after the blocks. Queries and keys
are divided by their RMS, and so are embeddings. What attention returns is multiplied by the sigmoid of a projection of
the layer's input. Three of four layers rotate and have a window; the others see all without positions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import Json, number, optional_integer, rope_config, windows_by_type
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, SandwichLayer
from jaxserve.models.family import TOWERS, Family, Nested
from jaxserve.models.layers import AttendFn, Attention, Cache, Linear, RopeTable, over_rms
from jaxserve.ops.linear import Products


class MuseAttention(Attention):
    """Attention whose result, [T, N * H], is multiplied by sigmoid(gate_proj(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        super().__init__(config, dtype)
        size = config.num_heads * config.head_dim, config.hidden_size
        self.gate_proj = Linear(size, ("q_heads", "embed"), dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Attend x [T, D] -> (out [T, D], cache)."""
        out, cache = self.attended(x, rope, cache, attend, linear)
        return self.o_proj(out * jax.nn.sigmoid(self.gate_proj(x, linear)), linear), cache


class MuseGlimmerForCausalLM(CausalLM):
    """Layers whose norm weights are around zero, unlike the final norm's."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        return SandwichLayer(config.replace(norm_offset=1.0), dtype, MuseAttention(config, dtype))

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Embed token_ids int32 [T] -> [T, D], the input of the first layer."""
        x = super().embed(token_ids)
        return over_rms(x, self.config.norm_eps).astype(x.dtype)


_PERIOD = 4  # layers, counted from the last, of which one sees all


def _muse_glimmer(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    head_dim, window = optional_integer(hf, "head_dim", 128), optional_integer(hf, "sliding_window", 2048)
    last = fields["num_layers"] - 1
    full = [(last - i) % _PERIOD == 0 for i in range(last + 1)]
    rope = rope_config(hf, head_dim)
    thetas = hf.get("layer_rope_theta") or [0 if each else rope.theta for each in full]
    if any(each not in (0, rope.theta) for each in thetas):
        raise ValueError(f"'layer_rope_theta' has other bases than 0 and {rope.theta:g}, which is not supported")
    return {
        "head_dim": head_dim,
        "rope": rope,
        "rope_layers": tuple(theta != 0 for theta in thetas),
        "layer_windows": windows_by_type(hf, window) or tuple(None if each else window for each in full),
        "qk_norm": "over_rms",
        "attention_scale": number(hf, "qk_scale_factor", 3.87) * head_dim**-0.5,
        "post_norm_eps": number(hf, "post_norm_eps", 1e-8),
        "logit_scale": number(hf, "output_multiplier", 0.19611613513818404),
        "logit_soft_cap": number(hf, "final_logit_softcapping", 20.0),
    }


FAMILIES = (
    Family("MuseGlimmerForCausalLM", MuseGlimmerForCausalLM, _muse_glimmer),
    Nested(
        ("MuseGlimmerForConditionalGeneration",),
        {"muse_glimmer_text": "MuseGlimmerForCausalLM"},
        unused=(*TOWERS, r"^model\.(vision_adapter|vision_projection)\."),
    ),
)
