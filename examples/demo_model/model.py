"""The demo model's forward and loss for training: a Llama decoder as plain functions over a dict of arrays.

Owns the shape of the model and its initial weights. Parameter names and layouts are those of a Hugging Face
Llama checkpoint (`[out, in]` matrices), so that saving needs no renaming. Knows nothing of text, data or the server.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]


@dataclass(frozen=True)
class DemoConfig:
    """Shape of the network, in the terms of Hugging Face's LlamaConfig."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048


@dataclass(frozen=True)
class PackedBatch:
    """Rows of several samples each, all arrays `[B, T]`.

    `segments` numbers the samples of a row from 1 (0 is padding); `positions` restart at each sample;
    `weights` float32 are the loss weights of `targets`, the tokens one step ahead of `tokens`.
    """

    tokens: np.ndarray | jax.Array
    targets: np.ndarray | jax.Array
    segments: np.ndarray | jax.Array
    positions: np.ndarray | jax.Array
    weights: np.ndarray | jax.Array


jax.tree_util.register_dataclass(PackedBatch)


def param_shapes(config: DemoConfig) -> dict[str, tuple[int, ...]]:
    """Return the checkpoint name and shape of every parameter."""
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * h, config.num_key_value_heads * h
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.num_hidden_layers):
        layer = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    return shapes


def init_params(config: DemoConfig, seed: int) -> Params:
    """Return float32 weights: norms 1, matrices normal with deviation 0.02, less if they write to the residual."""
    rng = np.random.default_rng(seed)
    residual_scale = (2 * config.num_hidden_layers) ** -0.5

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.float32)
        scale = residual_scale if "o_proj" in name or "down_proj" in name else 1.0
        fan_in = 0.02 if "embed" in name else shape[1] ** -0.5 * 0.7
        return jnp.asarray(rng.normal(0.0, fan_in * scale, shape), jnp.float32)

    return {name: draw(name, shape) for name, shape in param_shapes(config).items()}


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + eps) * weight[None, None, :]


def rope_tables(positions: jax.Array, config: DemoConfig) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines [B, T, 1, H/2] of the rotary embedding (Su et al., 2021)."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [B, T, N, H] by halves, as in Hugging Face checkpoints."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    x: jax.Array, layer: Params, rope: tuple[jax.Array, jax.Array], bias: jax.Array, config: DemoConfig
) -> jax.Array:
    """Compute grouped-query attention. bias [B, 1, 1, T, T]: 0 for visible tokens, else a large negative number."""
    b, t, _ = x.shape
    kv, h = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // kv
    q = rotate((x @ layer["self_attn.q_proj"].T).reshape(b, t, kv * group, h), *rope).reshape(b, t, kv, group, h)
    k = rotate((x @ layer["self_attn.k_proj"].T).reshape(b, t, kv, h), *rope)
    v = (x @ layer["self_attn.v_proj"].T).reshape(b, t, kv, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q * h**-0.5, k) + bias
    out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, axis=-1), v)
    return out.reshape(b, t, kv * group * h) @ layer["self_attn.o_proj"].T


def mlp(x: jax.Array, layer: Params) -> jax.Array:
    gate = jax.nn.silu(x @ layer["mlp.gate_proj"].T)
    return (gate * (x @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T


def layer_params(params: Params, index: int) -> Params:
    prefix = f"model.layers.{index}."
    return {n[len(prefix) : -len(".weight")]: p for n, p in params.items() if n.startswith(prefix)}


def attention_bias(segments: jax.Array) -> jax.Array:
    """Return the bias of causal attention within a sample, [B, 1, 1, T, T] of 0 and -1e9."""
    same = segments[:, :, None] == segments[:, None, :]
    causal = np.tri(segments.shape[1], dtype=bool)[None]
    return jnp.where(same & causal, 0.0, -1e9).astype(jnp.float32)[:, None, None]


def layer_outputs(
    params: Params, tokens: jax.Array, segments: jax.Array, positions: jax.Array, config: DemoConfig
) -> list[jax.Array]:
    """Return the hidden states of packed rows (see PackedBatch) after each layer, float32 [B, T, D] each."""
    x = params["model.embed_tokens.weight"][tokens]
    rope, bias, found = rope_tables(positions, config), attention_bias(segments), []
    for i in range(config.num_hidden_layers):
        layer = layer_params(params, i)
        x = x + attention(rms_norm(x, layer["input_layernorm"], config.rms_norm_eps), layer, rope, bias, config)
        x = x + mlp(rms_norm(x, layer["post_attention_layernorm"], config.rms_norm_eps), layer)
        found.append(x)
    return found


def hidden_states(
    params: Params, tokens: jax.Array, segments: jax.Array, positions: jax.Array, config: DemoConfig
) -> jax.Array:
    """Return what the head reads of packed rows (see PackedBatch), float32 [B, T, D]."""
    *_, last = layer_outputs(params, tokens, segments, positions, config)
    return rms_norm(last, params["model.norm.weight"], config.rms_norm_eps)


def forward(
    params: Params, tokens: jax.Array, segments: jax.Array, positions: jax.Array, config: DemoConfig
) -> jax.Array:
    """Return the logits of packed rows (see PackedBatch), float32 [B, T, V]."""
    x = hidden_states(params, tokens, segments, positions, config)
    return x @ params["model.embed_tokens.weight"].T


def loss_fn(params: Params, batch: PackedBatch, config: DemoConfig) -> jax.Array:
    """Return the weighted mean cross-entropy in nats."""
    logits = forward(
        params, jnp.asarray(batch.tokens), jnp.asarray(batch.segments), jnp.asarray(batch.positions), config
    )
    chosen = jnp.take_along_axis(logits, jnp.asarray(batch.targets)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(losses * batch.weights) / jnp.maximum(jnp.sum(jnp.asarray(batch.weights)), 1.0)
