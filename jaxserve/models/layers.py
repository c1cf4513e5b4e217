"""The building blocks that decoder families share, as Flax NNX modules. Flat, pure calls; no request, no cache layout.

Axis letters: T tokens of the step, D model, F ffn, V vocabulary, N query heads, KH kv heads, G = N / KH, H head dim.
Logical axes, beside each parameter's shape: embed (D), kv_heads, q_heads, ffn, vocab, expert; None is never split.
Activations have the weights' dtype; norms, rotation, softmax and logits are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config import AttentionLayer, ModelConfig
from jaxserve.models.rope import apply_rope
from jaxserve.models.weights import Part, param

RopeTable = tuple[jax.Array, jax.Array]
Cache = jax.Array | None


class LinearFn(Protocol):
    """ops.linear.linear, or that with options fixed: x [T, I], weight [*O, I], bias [*O] -> [T, *O] in `out_dtype`,
    or x's."""

    def __call__(
        self,
        x: jax.Array,
        w: jax.Array,
        bias: jax.Array | None = None,
        *,
        out_dtype: DTypeLike | None = None,
    ) -> jax.Array: ...


class AttendFn(Protocol):
    """Writes k and v [T, KH, H] to the layer's cache and attends q [T, N, H] to it: (out [T, N, H], cache)."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]: ...


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Embed(nnx.Module):
    """Token embeddings, weight [V, D]."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.weight = param((config.vocab_size, config.hidden_size), ("vocab", "embed"), dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32 [T] -> [T, D]. Ids are checked by the caller; one outside the vocabulary reads the nearest row."""
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = param((size,), (None,), dtype, init="ones")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        return (y * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Linear(nnx.Module):
    """weight [O, I], `axes` names them; bias [O] where asked for."""

    def __init__(
        self, size: tuple[int, int], axes: tuple[str | None, str | None], dtype: jnp.dtype, bias: bool = False
    ) -> None:
        self.weight = param(size, axes, dtype)
        self.bias = param(size[:1], axes[:1], dtype, init="zeros") if bias else None

    def __call__(self, x: jax.Array, linear: LinearFn) -> jax.Array:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class QKVProj(nnx.Module):
    """q_proj, k_proj and v_proj as one weight [KH, (G + 2) * H, D]: a split over kv heads cuts all three alike."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.group = config.num_heads // config.num_kv_heads
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
        parts, row = [], 0
        for name, heads in (("q_proj", self.group), ("k_proj", 1), ("v_proj", 1)):
            rows = heads * self.head_dim
            start = (0, row, *(0 for _ in tail))
            view = (self.kv_heads, rows, *tail)
            parts.append(Part(f"{name}.{kind}", (self.kv_heads * rows, *tail), view, start))
            row += rows
        return tuple(parts)

    def __call__(self, x: jax.Array, linear: LinearFn) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[T, D] -> q [T, N, H], k and v [T, KH, H]."""
        y = linear(x, self.weight[...], None if self.bias is None else self.bias[...])
        y = y.reshape(x.shape[0], self.kv_heads, self.group + 2, self.head_dim)
        q = y[:, :, : self.group].reshape(x.shape[0], -1, self.head_dim)
        return q, y[:, :, self.group], y[:, :, self.group + 1]


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; its features are the config's."""

    def __init__(self, config: ModelConfig, spec: AttentionLayer, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.interleaved = config.rope.interleaved
        self.qkv_proj = QKVProj(config, dtype)
        heads = config.num_heads * config.head_dim
        self.o_proj = Linear((config.hidden_size, heads), ("embed", "q_heads"), dtype, bias=config.out_bias)
        per_head = config.qk_norm == "head"
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, dtype) if per_head else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, dtype) if per_head else None

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: LinearFn
    ) -> tuple[jax.Array, Cache]:
        """x [T, D] and the rotary table of its positions -> (out [T, D], cache)."""
        q, k, v = self.qkv_proj(x, linear)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, rope, self.interleaved), apply_rope(k, rope, self.interleaved)
        out, cache = attend(q, k, v, cache)
        return self.o_proj(out.reshape(x.shape[0], -1), linear), cache


class GateUpProj(nnx.Module):
    """gate_proj and up_proj as one weight [F, 2, D]: a split over F cuts both alike."""

    def __init__(self, hidden: int, ffn: int, dtype: jnp.dtype, bias: bool) -> None:
        self.weight = param(
            (ffn, 2, hidden), ("ffn", None, "embed"), dtype, parts=self._parts("weight", ffn, (hidden,))
        )
        bias_parts = self._parts("bias", ffn, ())
        self.bias = param((ffn, 2), ("ffn", None), dtype, "zeros", bias_parts) if bias else None

    def _parts(self, kind: str, ffn: int, tail: tuple[int, ...]) -> tuple[Part, ...]:
        zeros = tuple(0 for _ in tail)
        names = enumerate(("gate_proj", "up_proj"))
        return tuple(Part(f"{name}.{kind}", (ffn, *tail), (ffn, 1, *tail), (0, i, *zeros)) for i, name in names)

    def __call__(self, x: jax.Array, linear: LinearFn) -> tuple[jax.Array, jax.Array]:
        """[T, D] -> gate and up, each [T, F]."""
        y = linear(x, self.weight[...], None if self.bias is None else self.bias[...])
        return y[:, :, 0], y[:, :, 1]


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, ffn: int | None = None) -> None:
        ffn = ffn or config.intermediate_size
        self.activation = config.activation
        self.gate_up_proj = GateUpProj(config.hidden_size, ffn, dtype, config.mlp_bias)
        self.down_proj = Linear((config.hidden_size, ffn), ("embed", "ffn"), dtype, bias=config.mlp_bias)

    def __call__(self, x: jax.Array, linear: LinearFn) -> jax.Array:
        """[T, D] -> [T, D]."""
        gate, up = self.gate_up_proj(x, linear)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up, linear)
