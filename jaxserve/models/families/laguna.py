"""Laguna: Qwen3's attention with a gate a head, head counts by layer, and a sigmoid router.

The gate is the softplus of one more projection, for each head ("per-head") or each of its numbers ("per-element").
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import (
    Json,
    boolean,
    head_dim_or,
    integer,
    number,
    optional_integer,
    ropes_by_layer_type,
    shown,
    sparse_layers,
    windows_by_type,
)
from jaxserve.models.config import LayerHeads, ModelConfig, MoEConfig, MoENames
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.family import Family
from jaxserve.models.layers import AttendFn, Attention, Cache, Linear, RopeTable
from jaxserve.models.moe import block_name, feed_forward
from jaxserve.ops.linear import Products


class GatedAttention(Attention):
    """Attention whose result is multiplied by gates of g_proj(x). per: gates of a head. kind: their function"""

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, per: int, kind: Literal["softplus", "sigmoid"] = "softplus"
    ) -> None:
        super().__init__(config, dtype)
        self.kind = kind
        self.g_proj = Linear((config.num_heads * per, config.hidden_size), ("q_heads", "embed"), dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Attend x [T, D] with the rotary table of its positions -> (out [T, D], cache)."""
        out, cache = self.attended(x, rope, cache, attend, linear)
        gate = jax.nn.softplus if self.kind == "softplus" else jax.nn.sigmoid
        gates = gate(self.g_proj(x, linear).astype(jnp.float32)).astype(out.dtype)  # [T, N] or [T, N * H]
        by_gate = out.reshape(*gates.shape, -1)
        return self.o_proj((by_gate * gates[:, :, None]).reshape(out.shape), linear), cache


class LagunaForCausalLM(CausalLM):
    """Pre-norm layers with gated attention."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        per = config.head_dim if config.output_gate == "per-element" else 1
        attention = GatedAttention(config.at(index), dtype, per)
        return PreNormLayer(config, dtype, attention, feed_forward(config, index, dtype), block_name(config, index))


_NAMES = MoENames(correction="experts.e_score_correction_bias", shared="shared_expert")


def _laguna(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers = fields["num_layers"]
    experts = MoEConfig(
        num_experts=integer(hf, "num_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        ffn=integer(hf, "moe_intermediate_size"),
        sparse_layers=sparse_layers(hf, layers, 1),
        router="sigmoid",
        soft_cap=number(hf, "moe_router_logit_softcapping", None) if hf.get("moe_router_logit_softcapping") else None,
        correction=True,
        scale=number(hf, "moe_routed_scaling_factor", 1.0),
        shared_ffn=integer(hf, "shared_expert_intermediate_size"),
        names=_NAMES,
    )
    gating = hf.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise ValueError(f"'gating' is {shown(gating)}, which is not supported (supported: per-head, per-element)")
    changes = head_dim_or(hf, 128) | {"qk_norm": "head", "moe": experts, "mlp_bias": False}
    rope, local = ropes_by_layer_type(hf, changes["head_dim"])
    counts = hf.get("num_attention_heads_per_layer") or [fields["num_heads"]] * layers
    if not isinstance(counts, list) or len(counts) != layers:
        raise ValueError(f"'num_attention_heads_per_layer' must have {layers} entries, not {shown(counts)}")
    heads = tuple(
        LayerHeads(
            integer({"num_attention_heads": each}, "num_attention_heads"), fields["num_kv_heads"], changes["head_dim"]
        )
        for each in counts
    )
    return changes | {
        "rope": rope,
        "local_rope": local,
        "layer_windows": windows_by_type(hf, optional_integer(hf, "sliding_window", 512)),
        "layer_heads": () if {each.num_heads for each in heads} == {fields["num_heads"]} else heads,
        "output_gate": "per-element" if gating == "per-element" else "per-head",
        "qkv_bias": boolean(hf, "attention_bias", False),
    }


_DEFAULTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}

FAMILIES = (
    Family(
        "LagunaForCausalLM",
        LagunaForCausalLM,
        _laguna,
        defaults=_DEFAULTS,
        supported={"moe_apply_router_weight_on_input": (False,)},
    ),
)
