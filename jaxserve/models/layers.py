"""Building blocks that decoder families share, as Flax NNX modules.

Axes: T tokens of the step, D hidden size, F ffn, V vocabulary, N query heads, KH kv heads, G = N / KH, H head_dim. Each
parameter names its logical axes for sharding: embed (D), kv_heads, q_heads, ffn, expert_ffn, vocab, expert. None is
never split. Activations have the weights' dtype or ModelConfig.activation_dtype. Norms, rotation, softmax and logits
are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.rope import apply_rope
from jaxserve.models.sharding import depth_axes
from jaxserve.models.weights import Part, param
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import Heads, ProjectedHeads
from jaxserve.ops.paged_attention.scaled_pages import Pages

RopeTable = tuple[jax.Array, jax.Array]
Cache = Pages | None


class AttendFn(Protocol):
    """Write k and v [T, KH, H] to the layer's cache and attend q [T, N, H] to it -> (out [T, N, H], cache)."""

    def __call__(self, heads: Heads, cache: Cache, sinks: jax.Array | None = None) -> tuple[jax.Array, Cache]: ...


@dataclass(frozen=True)
class GatedActivation:
    """The function of (gate, up) between the projections of a gated MLP.

    A frozen dataclass, not a closure, so that it compares by value: equal layers are traced once.
    """

    kind: Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        match self.kind:
            case "silu":
                return jax.nn.silu(gate) * up
            case "gelu" | "gelu_tanh":
                return jax.nn.gelu(gate, approximate=self.kind == "gelu_tanh") * up
            case "clamped_swiglu":  # gpt-oss clamps both, has a steeper sigmoid and adds 1 to up
                gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
                return gate * jax.nn.sigmoid(gate * 1.702) * (up + 1)


class Embed(nnx.Module):
    """Token embeddings, weight [V, D]."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.weight = param((config.vocab_size, config.hidden_size), ("vocab", "embed"), dtype)
        self.out_dtype = jnp.dtype(config.activation_dtype or dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Look up token_ids int32 [T] -> [T, D]. Ids are clipped to the vocabulary; the caller has checked them."""
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip").astype(self.out_dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * (weight + offset) over the last axis, in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.weight = param((size,), (None,), dtype, init="zeros" if config.norm_offset else "ones")
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32) + self.offset
        return (y * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Linear(nnx.Module):
    """A linear layer: weight [O, I] with the logical `axes`, and optionally bias [O]."""

    def __init__(
        self, size: tuple[int, int], axes: tuple[str | None, str | None], dtype: jnp.dtype, bias: bool = False
    ) -> None:
        self.weight = param(size, axes, dtype)
        self.bias = param(size[:1], axes[:1], dtype, init="zeros") if bias else None
        self.axes = axes

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        weight = self.weight[...]
        bias = None if self.bias is None else self.bias[...]
        return linear(x, weight, bias, split=depth_axes(self.axes, weight))

    def in_float32(self, x: jax.Array, linear: Products) -> jax.Array:
        """Apply the layer to x [R, I] in float32 -> [R, O].

        For small classification heads, whose outputs are compared between texts.
        """
        weight, bias = (None if w is None else w[...].astype(jnp.float32) for w in (self.weight, self.bias))
        assert weight is not None
        return linear(x.astype(jnp.float32), weight, bias)


class QKVProj(nnx.Module):
    """q_proj, k_proj and v_proj fused into one weight [KH, (G + 2) * H, D]. A split over kv heads splits all three."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        self.packed, self.kv_repeat = config.packed_projections, config.kv_repeat
        rows = (self.group + 2) * self.head_dim
        shape = (self.kv_heads, rows, config.hidden_size)
        self.weight = param(
            shape, ("kv_heads", None, "embed"), dtype, parts=self._parts("weight", (config.hidden_size,))
        )
        self.bias = (
            param(shape[:2], ("kv_heads", None), dtype, init="zeros", parts=self._parts("bias", ()))
            if config.qkv_bias
            else None
        )

    def _parts(self, kind: str, tail: tuple[int, ...]) -> tuple[Part, ...]:
        parts, row, first = [], 0, 0
        all_rows = (self.kv_heads * self.group + 2 * self.kv_heads // self.kv_repeat) * self.head_dim
        sources = (("q_proj", self.group, 1), ("k_proj", 1, self.kv_repeat), ("v_proj", 1, self.kv_repeat))
        for name, heads, repeat in sources:
            rows = heads * self.head_dim
            total = self.kv_heads // repeat * rows
            start = (0, row, *(0 for _ in tail))
            view = (self.kv_heads, rows, *tail)
            if self.packed:
                taken = first, first + total
                parts.append(Part(f"qkv_proj.{kind}", (all_rows, *tail), view, start, taken, repeat=repeat))
            else:
                parts.append(Part(f"{name}.{kind}", (total, *tail), view, start, repeat=repeat))
            row, first = row + rows, first + total
        return tuple(parts)

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        """Project x [T, D] -> [T, KH, G + 2, H]: the query heads of each kv head, its K and its V."""
        y = linear(x, self.weight[...], None if self.bias is None else self.bias[...])
        return y.reshape(x.shape[0], self.kv_heads, self.group + 2, self.head_dim)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions. The config decides about biases, norms and sinks."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.interleaved = config.rope.interleaved
        self.norm_all_heads = config.qk_norm == "full"
        self.qkv_proj = QKVProj(config, dtype)
        heads = config.num_heads * config.head_dim
        self.o_proj = Linear((config.hidden_size, heads), ("embed", "q_heads"), dtype, bias=config.out_bias)
        q_size, k_size = config.head_dim, config.head_dim
        if self.norm_all_heads:
            q_size, k_size = heads, config.num_kv_heads * config.head_dim
        self.q_norm = RMSNorm(q_size, config, dtype) if config.qk_norm != "none" else None
        self.k_norm = RMSNorm(k_size, config, dtype) if config.qk_norm != "none" else None
        self.sinks = param((config.num_heads,), ("q_heads",), dtype) if config.attention_sinks else None

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Attend x [T, D] with the rotary table of its positions -> (out [T, D], cache)."""
        y = self.qkv_proj(x, linear)
        q, k, v = y[:, :, :-2].reshape(x.shape[0], -1, y.shape[3]), y[:, :, -2], y[:, :, -1]
        q, k = self._normed(q, self.q_norm, linear), self._normed(k, self.k_norm, linear)
        if rope is not None:
            q, k = apply_rope(q, rope, self.interleaved), apply_rope(k, rope, self.interleaved)
        heads = Heads(q, k, v, self._projected(y, rope))
        out, cache = attend(heads, cache, None if self.sinks is None else self.sinks[...])
        return self.o_proj(out.reshape(x.shape[0], -1), linear), cache

    def _projected(self, rows: jax.Array, rope: RopeTable | None) -> ProjectedHeads | None:
        """Return the remaining steps (norms, rotation) for rows [T, KH, G + 2, H]; None if a norm is over all heads."""
        if self.norm_all_heads:
            return None
        norms, eps, offset = None, 0.0, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight[...], self.k_norm.weight[...]
            eps, offset = self.q_norm.eps, self.q_norm.offset
        return ProjectedHeads(rows, norms, eps, offset, rope, self.interleaved)

    def _normed(self, heads: jax.Array, norm: RMSNorm | None, linear: Products) -> jax.Array:
        if norm is None:
            return heads
        if self.norm_all_heads:
            return linear.whole(heads.reshape(heads.shape[0], -1), norm).reshape(heads.shape)
        return norm(heads)


class GateUpProj(nnx.Module):
    """gate_proj and up_proj fused into one weight [F, 2, D]. A split over F splits both."""

    def __init__(self, config: ModelConfig, ffn: int, dtype: jnp.dtype) -> None:
        self.packed = config.packed_projections
        model = config.hidden_size
        self.weight = param((ffn, 2, model), ("ffn", None, "embed"), dtype, parts=self._parts("weight", ffn, (model,)))
        bias_parts = self._parts("bias", ffn, ())
        self.bias = param((ffn, 2), ("ffn", None), dtype, "zeros", bias_parts) if config.mlp_bias else None

    def _parts(self, kind: str, ffn: int, tail: tuple[int, ...]) -> tuple[Part, ...]:
        parts = []
        for i, name in enumerate(("gate_proj", "up_proj")):
            view, start = (ffn, 1, *tail), (0, i, *(0 for _ in tail))
            if self.packed:
                rows = (i * ffn, (i + 1) * ffn)
                parts.append(Part(f"gate_up_proj.{kind}", (2 * ffn, *tail), view, start, rows))
            else:
                parts.append(Part(f"{name}.{kind}", (ffn, *tail), view, start))
        return tuple(parts)

    def __call__(self, x: jax.Array, linear: Products) -> tuple[jax.Array, jax.Array]:
        """Project x [T, D] -> gate and up, each [T, F]."""
        y = linear(x, self.weight[...], None if self.bias is None else self.bias[...])
        return y[:, :, 0], y[:, :, 1]


class MLP(nnx.Module):
    """The gated MLP down(activation(gate(x), up(x)))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, ffn: int | None = None) -> None:
        ffn = ffn or config.intermediate_size
        self.activation = GatedActivation(config.activation, config.activation_limit)
        self.gate_up_proj = GateUpProj(config, ffn, dtype)
        self.down_proj = Linear((config.hidden_size, ffn), ("embed", "ffn"), dtype, bias=config.mlp_bias)

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        """Run the MLP: x [T, D] -> [T, D]."""
        return self.down_proj(self.activation(*self.gate_up_proj(x, linear)), linear)
