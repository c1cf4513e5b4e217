"""DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437): multi-head latent attention, shared and routed experts.

Kimi K2 is DeepSeek-V3, and so is the language model of Kimi K2.5 to 2.7. GLM-4.7-Flash differs only by its defaults.

The KV cache stores one vector per token, which all heads read: the latent (kv_rank) and the shared rotated key
(rope_dim). The key projection is applied to the query instead, and the value projection after attention. Both are
mathematically exact:

    q_nope . (W_k latent) + q_rope . k_rope  =  [W_k^T q_nope, q_rope] . [latent, k_rope]
    sum_s p_s (W_v latent_s)                 =  W_v (sum_s p_s latent_s)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import (
    Json,
    boolean,
    integer,
    number,
    optional_integer,
    predictors,
    rope_config,
    sparse_layers,
)
from jaxserve.models.config import LatentConfig, ModelConfig, MoEConfig, PredictorHead
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.draft_head import of_deepseek
from jaxserve.models.family import Family, Nested
from jaxserve.models.layers import AttendFn, Cache, Linear, RMSNorm, RopeTable
from jaxserve.models.moe import feed_forward
from jaxserve.models.rope import apply_rope, scale_queries
from jaxserve.models.weights import Part, param
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import Heads


class HeadProj(nnx.Module):
    """A weight [N, rows, I], split over heads. The checkpoint stores it as [N * rows, I]."""

    def __init__(self, name: str, heads: int, rows: int, size: int, dtype: jnp.dtype) -> None:
        shape = (heads, rows, size)
        parts = (Part(f"{name}.weight", (heads * rows, size), shape, (0, 0, 0)),)
        self.weight = param(shape, ("q_heads", None, None), dtype, parts=parts)


class LatentAttention(nnx.Module):
    """Multi-head latent attention (MLA) on the compressed cache."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, dtype: jnp.dtype) -> None:
        heads, model, rank = config.num_heads, config.hidden_size, latent.q_rank
        self.latent = latent
        self.interleaved = config.rope.interleaved
        head_rows = latent.nope_dim + latent.rope_dim
        self.q_a_proj = self.q_a_layernorm = self.q_b_proj = self.q_proj = None
        if rank is None:
            self.q_proj = nnx.data(HeadProj("q_proj", heads, head_rows, model, dtype))
        else:
            self.q_a_proj = nnx.data(Linear((rank, model), (None, "embed"), dtype, bias=config.qkv_bias))
            self.q_a_layernorm = nnx.data(RMSNorm(rank, config, dtype))
            self.q_b_proj = nnx.data(HeadProj("q_b_proj", heads, head_rows, rank, dtype))
        rows = latent.kv_rank + latent.rope_dim
        self.kv_a_proj_with_mqa = Linear((rows, model), (None, "embed"), dtype, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, config, dtype)
        self.kv_b_proj = HeadProj("kv_b_proj", heads, latent.nope_dim + latent.v_dim, latent.kv_rank, dtype)
        out = (model, heads * latent.v_dim)
        self.o_proj = Linear(out, ("embed", "q_heads"), dtype, bias=config.out_bias)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Attend x [T, D] -> (out [T, D], cache)."""
        rank, nope = self.latent.kv_rank, self.latent.nope_dim
        q = self._queries(x, linear)
        row = self.kv_a_proj_with_mqa(x, linear)
        latent = self.kv_a_layernorm(row[:, :rank])[:, None, :]
        k_rope = self._rotated(row[:, None, rank:], rope)
        kv_b = self.kv_b_proj.weight[...].astype(x.dtype)
        q_latent = _by_head(q[:, :, :nope], kv_b[:, :nope].swapaxes(1, 2), linear)
        q = jnp.concatenate([q_latent, self._rotated(q[:, :, nope:], rope)], axis=-1)
        q = q if rope is None else scale_queries(q, rope)
        k = jnp.concatenate([latent, k_rope], axis=-1)
        out, cache = attend(Heads(q, k, k), cache, None)
        out = _by_head(out[:, :, :rank], kv_b[:, nope:], linear)
        return self.o_proj(out.reshape(x.shape[0], -1), linear), cache

    def _rotated(self, x: jax.Array, rope: RopeTable | None) -> jax.Array:
        return x if rope is None else apply_rope(x, rope, self.interleaved)

    def _queries(self, x: jax.Array, linear: Products) -> jax.Array:
        """Project x [T, D] -> queries [T, N, nope + rope]."""
        if self.q_proj is not None:
            return linear(x, self.q_proj.weight[...])
        assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
        return linear(self.q_a_layernorm(self.q_a_proj(x, linear)), self.q_b_proj.weight[...])


def _by_head(x: jax.Array, w: jax.Array, linear: Products) -> jax.Array:
    """Multiply x [T, N, I] by the weight of each head w [N, O, I] transposed -> [T, N, O].

    On a CPU XLA sums the products of all heads at once, in an order that depends on T. In deterministic mode each head
    is therefore multiplied alone there.
    """
    at_once = functools.partial(jnp.einsum, "tni,noi->tno")
    if not linear.deterministic:
        return at_once(x, w)

    def one_by_one(x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiply one head at a time. x: [T, N, I], w: [N, O, I]"""
        return jax.lax.map(lambda head: linear(*head), (x.swapaxes(0, 1), w)).swapaxes(0, 1)

    return jax.lax.platform_dependent(x, w, cpu=one_by_one, default=at_once)


class DeepseekV3ForCausalLM(CausalLM):
    """The first layers are dense. The others have a shared expert and grouped experts with a sigmoid router."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        assert config.latent is not None
        attention = LatentAttention(config, config.latent, dtype)
        return PreNormLayer(config, dtype, attention, feed_forward(config, index, dtype))


def deepseek_v3(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3 and of the families with its attention and experts. See `Family.changes`."""
    latent = LatentConfig(
        kv_rank=integer(hf, "kv_lora_rank"),
        q_rank=optional_integer(hf, "q_lora_rank", None),
        nope_dim=integer(hf, "qk_nope_head_dim"),
        rope_dim=integer(hf, "qk_rope_head_dim"),
        v_dim=integer(hf, "v_head_dim"),
    )
    rope = dataclasses.replace(rope_config(hf, latent.rope_dim), interleaved=boolean(hf, "rope_interleave", True))
    return {
        "head_dim": latent.nope_dim + latent.rope_dim,
        "rope": rope,
        "latent": latent,
        "attention_scale": (latent.nope_dim + latent.rope_dim) ** -0.5 * _yarn_score_factor(hf),
        "moe": deepseek_experts(hf, fields, dense=3),
        "ignored_tensors": predictors(hf, fields["num_layers"]),
        "predictor": deepseek_head(hf, fields["num_layers"]),
    }


def _glm4_moe_lite(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return deepseek_v3(hf, fields) | {"moe": deepseek_experts(hf, fields, dense=1)}


def deepseek_experts(hf: Json, fields: dict[str, Any], dense: int) -> MoEConfig:
    """Return the experts of DeepSeek-V3 and of the families with its router. dense: see `sparse_layers`"""
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or hf.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError("only the router of DeepSeek-V3 is supported: 'scoring_func' sigmoid, 'topk_method' noaux_tc")
    ffn = integer(hf, "moe_intermediate_size")
    return MoEConfig(
        num_experts=integer(hf, "n_routed_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        ffn=ffn,
        sparse_layers=sparse_layers(hf, fields["num_layers"], dense),
        router="sigmoid",
        correction=True,
        normalize_eps=1e-20,
        normalize=boolean(hf, "norm_topk_prob", True),
        num_groups=optional_integer(hf, "n_group", 1),
        topk_groups=optional_integer(hf, "topk_group", 1),
        scale=number(hf, "routed_scaling_factor", 1.0),
        shared_ffn=ffn * optional_integer(hf, "n_shared_experts", 0),
    )


def deepseek_head(hf: Json, layers: int) -> PredictorHead | None:
    """Return the head for multi-token prediction behind the last layer, in DeepSeek-V3's form; None: there is none."""
    return of_deepseek(layers) if predictors(hf, layers) else None


def _yarn_score_factor(hf: Json) -> float:
    """Return the factor of DeepSeek's YaRN on the scores: the square of its mscale_all_dim term."""
    p = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    weight, factor = number(p, "mscale_all_dim", 0.0), number(p, "factor", 1.0)
    return 1.0 if not weight or factor <= 1 else (0.1 * weight * math.log(factor) + 1.0) ** 2


_LITE = {
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}

FAMILIES = (
    Family(
        "DeepseekV3ForCausalLM",
        DeepseekV3ForCausalLM,
        deepseek_v3,
        defaults={"moe_intermediate_size": 2048},
        supported={"moe_layer_freq": (1,)},
    ),
    Family("Glm4MoeLiteForCausalLM", DeepseekV3ForCausalLM, _glm4_moe_lite, defaults=_LITE),
    Nested(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"},
    ),
)
