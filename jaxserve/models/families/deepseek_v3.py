"""DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437): multi-head latent attention, shared and routed experts.

The cache holds one row a token, the latent (kv_rank) and the shared rotated key (rope_dim), read by all heads: the
key projection is moved to the query and the value projection behind the attention, which is exact:

    q_nope . (W_k latent) + q_rope . k_rope  =  [W_k^T q_nope, q_rope] . [latent, k_rope]
    sum_s p_s (W_v latent_s)                 =  W_v (sum_s p_s latent_s)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import LatentConfig, ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.layers import AttendFn, Cache, Linear, LinearFn, RMSNorm, RopeTable
from jaxserve.models.moe import feed_forward
from jaxserve.models.rope import apply_rope
from jaxserve.models.weights import Part, param


class HeadProj(nnx.Module):
    """A weight [N, rows, I] that the checkpoint keeps as [N * rows, I]; split over heads."""

    def __init__(self, name: str, heads: int, rows: int, size: int, dtype: jnp.dtype) -> None:
        shape = (heads, rows, size)
        parts = (Part(f"{name}.weight", (heads * rows, size), shape, (0, 0, 0)),)
        self.weight = param(shape, ("q_heads", None, None), dtype, parts=parts)


class LatentAttention(nnx.Module):
    """Multi-head latent attention over the compressed cache."""

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
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: LinearFn
    ) -> tuple[jax.Array, Cache]:
        """x [T, D] -> (out [T, D], cache)."""
        assert rope is not None
        rank, nope = self.latent.kv_rank, self.latent.nope_dim
        q = self._queries(x, linear)
        row = self.kv_a_proj_with_mqa(x, linear)
        latent = self.kv_a_layernorm(row[:, :rank])[:, None, :]
        k_rope = apply_rope(row[:, None, rank:], rope, self.interleaved)
        kv_b = self.kv_b_proj.weight[...]
        q_latent = jnp.einsum("tnh,nhr->tnr", q[:, :, :nope], kv_b[:, :nope])
        q = jnp.concatenate([q_latent, apply_rope(q[:, :, nope:], rope, self.interleaved)], axis=-1)
        k = jnp.concatenate([latent, k_rope], axis=-1)
        out, cache = attend(q, k, k, cache, None)
        out = jnp.einsum("tnr,nvr->tnv", out[:, :, :rank], kv_b[:, nope:])
        return self.o_proj(out.reshape(x.shape[0], -1), linear), cache

    def _queries(self, x: jax.Array, linear: LinearFn) -> jax.Array:
        """[T, D] -> [T, N, nope + rope]."""
        if self.q_proj is not None:
            return linear(x, self.q_proj.weight[...])
        assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
        return linear(self.q_a_layernorm(self.q_a_proj(x, linear)), self.q_b_proj.weight[...])


class DeepseekV3ForCausalLM(CausalLM):
    """The first layers are dense; the others have a shared expert and sigmoid-routed ones in groups."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        assert config.latent is not None
        attention = LatentAttention(config, config.latent, dtype)
        return PreNormLayer(config, dtype, attention, feed_forward(config, index, dtype))
