"""Building blocks that decoder families share, as Flax NNX modules.

Axes: T tokens of the step, D hidden size, F ffn, V vocabulary, N query heads, KH kv heads, G = N / KH, H head_dim. Each
parameter names its logical axes for sharding: embed (D), kv_heads, q_heads, ffn, expert_ffn, vocab, expert. None is
never split. Activations have the weights' dtype or ModelConfig.activation_dtype. Norms, rotation, softmax and logits
are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import Activation, ModelConfig
from jaxserve.models.low_rank import Adaptable
from jaxserve.models.rope import RopeTable as RopeTable
from jaxserve.models.rope import apply_rope, scale_queries
from jaxserve.models.sharding import depth_axes
from jaxserve.models.weights import Part, param
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import Heads, ProjectedHeads
from jaxserve.ops.paged_attention.scaled_pages import Pages
from jaxserve.ops.state import StateArrays, StateSpec, StateWeights

Cache = Pages | StateArrays | None


class StateInputs(NamedTuple):
    """The inputs that a layer with a recurrent state passes in place of heads: see `ops.state.StateBackend.recur`."""

    raw: jax.Array  # [T, Hk, C]
    weights: StateWeights


class AttendFn(Protocol):
    """Write k and v [T, KH, H] to the layer's cache and attend q [T, N, H] to it -> (out [T, N, H], cache).

    If k and v are None, only attend. The inputs of a recurrent state advance it -> (out [T, heads, V], cache).
    """

    def __call__(
        self, heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]: ...


@dataclass(frozen=True)
class GatedActivation:
    """The function of (gate, up) between the projections of a gated MLP.

    A frozen dataclass, not a closure, so that it compares by value: equal layers are traced once.
    """

    kind: Activation
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.kind == "clamped_swiglu":  # gpt-oss clamps both, has a steeper sigmoid and adds 1 to up
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
            return gate * jax.nn.sigmoid(gate * 1.702) * (up + 1)
        if self.kind == "clamped_silu":  # Step 3.7 clamps both halves after the activation
            return jnp.minimum(jax.nn.silu(gate), self.limit) * jnp.clip(up, -self.limit, self.limit)
        return activated(gate, self.kind) * up


@dataclass(frozen=True)
class PlainActivation:
    """The function between the projections of an MLP without a gate. It compares by value, as `GatedActivation`."""

    kind: Activation

    def __call__(self, up: jax.Array) -> jax.Array:
        return activated(up, self.kind)


def activated(x: jax.Array, kind: Activation) -> jax.Array:
    """Apply an activation without parameters to x of any shape."""
    match kind:
        case "silu":
            return jax.nn.silu(x)
        case "gelu" | "gelu_tanh":
            return jax.nn.gelu(x, approximate=kind == "gelu_tanh")
        case "relu2":
            return jnp.square(jax.nn.relu(x))
    raise ValueError(kind)


class Embed(nnx.Module):
    """Token embeddings, weight [V, D]."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.weight = param((config.vocab_size, config.hidden_size), ("vocab", "embed"), dtype)
        self.out_dtype = jnp.dtype(config.activation_dtype or dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Look up token_ids int32 [T] -> [T, D]. Ids are clipped to the vocabulary; the caller has checked them."""
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip").astype(self.out_dtype)


def over_rms(x: jax.Array, eps: float) -> jax.Array:
    """Return x / rms(x) over the last axis of x [...], in float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """x / rms(x) * (weight + offset) over the last axis, in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.weight = param((size,), (None,), dtype, init="zeros" if config.norm_offset else "ones")
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        y = over_rms(x, self.eps)
        weight = self.weight[...].astype(jnp.float32) + self.offset
        return (y * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / deviation * (weight + offset) + bias over the last axis, in float32. bias: if the config has it"""

    def __init__(self, size: int, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.weight = param((size,), (None,), dtype, init="zeros" if config.norm_offset else "ones")
        self.bias = param((size,), (None,), dtype, init="zeros") if config.norm_bias else None
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = over_rms(y - y.mean(axis=-1, keepdims=True), self.eps)
        y = y * (self.weight[...].astype(jnp.float32) + self.offset)[None, :]
        return (y if self.bias is None else y + self.bias[...].astype(jnp.float32)[None, :]).astype(x.dtype)


def layer_norm(config: ModelConfig, dtype: jnp.dtype) -> RMSNorm | LayerNorm:
    """Make a norm over the hidden state, of the config's kind."""
    return (RMSNorm if config.norm == "rms" else LayerNorm)(config.hidden_size, config, dtype)


class Linear(Adaptable):
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
        split = depth_axes(self.axes, weight)
        return self.adapted(x, linear(x, weight, bias, split=split), linear, split)

    def in_float32(self, x: jax.Array, linear: Products) -> jax.Array:
        """Apply the layer to x [R, I] in float32 -> [R, O].

        For small classification heads, whose outputs are compared between texts.
        """
        weight, bias = (None if w is None else w[...].astype(jnp.float32) for w in (self.weight, self.bias))
        assert weight is not None
        return linear(x.astype(jnp.float32), weight, bias)


QKV = ("q_proj", "k_proj", "v_proj")


class QKVProj(Adaptable):
    """q_proj, k_proj and v_proj fused into one weight [KH, (G + 2) * H, D]. A split over kv heads splits all three.

    With output_gate "queries" each query head is followed by its gate, so there are 2 G + 2 rows of H.
    names: those that the checkpoint has, in this order. Without the last of them G + 2 becomes G + 1, and so on.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, names: tuple[str, ...] = QKV) -> None:
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.group = config.num_heads // config.num_kv_heads * (2 if config.output_gate == "queries" else 1)
        self.packed, self.kv_repeat = config.packed_qkv, config.kv_repeat
        self.names = names
        rows = (self.group + len(names) - 1) * self.head_dim
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
        for name in self.names:
            heads, repeat = (self.group, 1) if name == QKV[0] else (1, self.kv_repeat)
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
        """Project x [T, D] -> [T, KH, G + 2, H]: the query heads of each kv head (and gates), its K and its V."""
        y = self.adapted(x, linear(x, self.weight[...], None if self.bias is None else self.bias[...]), linear)
        return y.reshape(x.shape[0], self.kv_heads, self.group + len(self.names) - 1, self.head_dim)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions. The config decides about biases, norms and sinks."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.interleaved = config.rope.interleaved
        self.norm_all_heads, self.over_rms = config.qk_norm == "full", config.qk_norm == "over_rms"
        self.norm_after_rope, self.eps = config.qk_norm == "rotated_head", config.norm_eps
        self.qkv_proj = QKVProj(config, dtype)
        heads = config.num_heads * config.head_dim
        self.o_proj = Linear((config.hidden_size, heads), ("embed", "q_heads"), dtype, bias=config.out_bias)
        q_size, k_size = config.head_dim, config.head_dim
        if self.norm_all_heads:
            q_size, k_size = heads, config.num_kv_heads * config.head_dim
        weighted = config.qk_norm in ("head", "rotated_head", "full")
        self.q_norm = RMSNorm(q_size, config, dtype) if weighted else None
        self.k_norm = RMSNorm(k_size, config, dtype) if weighted else None
        self.sinks = param((config.num_heads,), ("q_heads",), dtype) if config.attention_sinks else None
        self.gated = config.output_gate == "queries"

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Attend x [T, D] with the rotary table of its positions -> (out [T, D], cache)."""
        out, cache = self.attended(x, rope, cache, attend, linear)
        return self.o_proj(out, linear), cache

    def attended(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Return all heads' results for x [T, D], before the output projection: ([T, N * H], cache)."""
        y = self.qkv_proj(x, linear)
        queries = y[:, :, :-2]
        q = (queries[:, :, ::2] if self.gated else queries).reshape(x.shape[0], -1, y.shape[3])
        k, v = y[:, :, -2], y[:, :, -1]
        if not self.norm_after_rope:
            q, k = self._normed(q, self.q_norm, linear), self._normed(k, self.k_norm, linear)
        if rope is not None:
            q, k = apply_rope(q, rope, self.interleaved), apply_rope(k, rope, self.interleaved)
            q = scale_queries(q, rope)
        if self.norm_after_rope:
            q, k = self._normed(q, self.q_norm, linear), self._normed(k, self.k_norm, linear)
        heads = Heads(q, k, v, self._projected(y, rope))
        out, cache = attend(heads, cache, None if self.sinks is None else self.sinks[...])
        if self.gated:
            out = out * jax.nn.sigmoid(queries[:, :, 1::2].reshape(out.shape))
        return out.reshape(x.shape[0], -1), cache

    def _projected(self, rows: jax.Array, rope: RopeTable | None) -> ProjectedHeads | None:
        """Return the remaining steps (norms, rotation) for rows [T, KH, G + 2, H].

        None if there are others: a norm over all heads or after the rotation, a scale by position, or gates.
        """
        scales = rope is not None and rope.query_scale is not None
        if self.norm_all_heads or self.norm_after_rope or self.gated or scales:
            return None
        norms, eps, offset = None, 0.0, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight[...], self.k_norm.weight[...]
            eps, offset = self.q_norm.eps, self.q_norm.offset
        elif self.over_rms:
            norms, eps = (jnp.ones(rows.shape[3]), jnp.ones(rows.shape[3])), self.eps
        table = None if rope is None else (rope.cos, rope.sin)
        return ProjectedHeads(rows, norms, eps, offset, table, self.interleaved)

    def _normed(self, heads: jax.Array, norm: RMSNorm | None, linear: Products) -> jax.Array:
        if norm is None:
            return over_rms(heads, self.eps).astype(heads.dtype) if self.over_rms else heads
        if self.norm_all_heads:
            return linear.whole(heads.reshape(heads.shape[0], -1), norm).reshape(heads.shape)
        return norm(heads)


class GateUpProj(Adaptable):
    """gate_proj and up_proj fused into one weight [F, 2, D]. A split over F splits both."""

    def __init__(self, config: ModelConfig, ffn: int, dtype: jnp.dtype) -> None:
        self.packed = config.packed_gate_up
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
        y = self.adapted(x, linear(x, self.weight[...], None if self.bias is None else self.bias[...]), linear)
        return y[:, :, 0], y[:, :, 1]


class HeadRows(Adaptable):
    """A projection to the rows of each key head of a state: weight [Hk, rows, D], and maybe a bias [Hk, rows]."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: jnp.dtype,
        parts: tuple[Part, ...],
        bias_parts: tuple[Part, ...] = (),
    ) -> None:
        axes = ("kv_heads", None, "embed")
        self.weight = param(shape, axes, dtype, parts=parts)
        self.bias = param(shape[:2], axes[:2], dtype, "zeros", bias_parts) if bias_parts else None

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        """Project x [T, D] -> [T, Hk, rows]."""
        y = linear(x, self.weight[...], None if self.bias is None else self.bias[...])
        return self.adapted(x, y, linear)


class ConvTaps(nnx.Module):
    """The taps of a state's causal convolution of each channel: weight [W, Hk, channels]."""

    def __init__(self, spec: StateSpec, dtype: jnp.dtype, parts: tuple[Part, ...]) -> None:
        shape = (spec.conv_width, spec.key_heads, spec.channels)
        self.weight = param(shape, (None, "kv_heads", None), dtype, parts=parts)


class MLP(nnx.Module):
    """The gated MLP down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, ffn: int | None = None) -> None:
        ffn = ffn or config.intermediate_size
        self.activation = GatedActivation(config.activation, config.activation_limit)
        self.gate_up_proj = GateUpProj(config, ffn, dtype)
        self.down_proj = Linear((config.hidden_size, ffn), ("embed", "ffn"), dtype, bias=config.mlp_bias)

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        """Run the MLP: x [T, D] -> [T, D]."""
        return self.down_proj(self.activation(*self.gate_up_proj(x, linear)), linear)


class XIELU(nnx.Module):
    """xIELU (https://arxiv.org/abs/2411.13010), whose numbers are learned in each layer. Computed in float32.

    alpha_p x^2 + beta x for x > 0, else alpha_n (exp(min(x, eps)) - 1 - x) + beta x. The checkpoint has the inverse
    softplus of alpha_p and of alpha_n - beta.
    """

    def __init__(self, dtype: jnp.dtype) -> None:
        self.alpha_p = param((1,), (None,), dtype, init="zeros")
        self.alpha_n = param((1,), (None,), dtype, init="zeros")
        self.beta = param((1,), (None,), dtype, "ones", (Part("act_fn.beta", (), (1,), (0,)),))
        self.eps = param((1,), (None,), dtype, "zeros", (Part("act_fn.eps", (), (1,), (0,)),))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        alpha_p, alpha_n = (jax.nn.softplus(w[...][0].astype(jnp.float32)) for w in (self.alpha_p, self.alpha_n))
        beta, eps = (w[...][0].astype(jnp.float32) for w in (self.beta, self.eps))
        below = (alpha_n + beta) * (jnp.expm1(jnp.minimum(y, eps)) - y)
        return (jnp.where(y > 0, alpha_p * y * y, below) + beta * y).astype(x.dtype)


class UngatedMLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, ffn: int | None = None) -> None:
        ffn, model = ffn or config.intermediate_size, config.hidden_size
        self.kind: Activation = config.activation
        self.up_proj = Linear((ffn, model), ("ffn", "embed"), dtype, bias=config.mlp_bias)
        self.down_proj = Linear((model, ffn), ("embed", "ffn"), dtype, bias=config.mlp_bias)
        self.act_fn = XIELU(dtype) if config.activation == "xielu" else None

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        """Run the MLP: x [T, D] -> [T, D]."""
        y = self.up_proj(x, linear)
        return self.down_proj(activated(y, self.kind) if self.act_fn is None else self.act_fn(y), linear)
