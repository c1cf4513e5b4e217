"""The forward as a plain function of weights and tokens, without pages: for research scripts and tests.

    model = load_model(directory, dtype=jnp.float32)
    logits = jax.jit(functools.partial(dense_logits, model.structure))(model.leaves, token_ids)

Quadratic in the length, one sequence, no cache: not for serving.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.config import AttentionLayer, ModelConfig
from jaxserve.models.decoder import AttendLayer
from jaxserve.models.encoder import TextClassifier, Texts
from jaxserve.models.layers import Cache, StateInputs
from jaxserve.models.pooling import PoolingConfig, pool
from jaxserve.ops.paged_attention import Heads
from jaxserve.ops.state import StateSpec
from jaxserve.ops.state.base import convolve, prepare
from jaxserve.ops.state.reference import advance, with_skip


def dense_logits(structure: ModelStructure, leaves: tuple[jax.Array, ...], token_ids: jax.Array) -> jax.Array:
    """Compute float32 logits [T, V] of one sequence, int32 [T], from position 0. Pure; differentiable in the leaves."""
    model = structure.bind(leaves)
    return model.logits(dense_hidden(structure, leaves, token_ids))


def dense_hidden(structure: ModelStructure, leaves: tuple[jax.Array, ...], token_ids: jax.Array) -> jax.Array:
    """Compute the hidden states [T, D] of int32 [T] after the final norm: the input of the output head."""
    positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    caches = (None,) * structure.config.num_layers
    hidden, _ = structure.bind(leaves)(token_ids, positions, caches, dense_attend(structure.config))
    return hidden


def dense_embedding(
    structure: ModelStructure, pooling: PoolingConfig, leaves: tuple[jax.Array, ...], token_ids: jax.Array
) -> jax.Array:
    """Compute the embedding, float32 [D], of one text, int32 [T], for an encoder or a decoder."""
    lengths = jnp.full(1, token_ids.shape[0], jnp.int32)
    if structure.config.bidirectional:
        hidden = structure.bind_encoder(leaves)(Texts(token_ids[None, :], lengths))
    else:
        hidden = dense_hidden(structure, leaves, token_ids)[None]
    return pool(hidden, lengths, pooling)[0]


def dense_scores(
    structure: ModelStructure, leaves: tuple[jax.Array, ...], token_ids: jax.Array, second_text: int = 0
) -> jax.Array:
    """Compute the numbers of a classification head, float32 [labels], of one text or pair, int32 [T].

    second_text: index of the first token of token type 1; 0: there is none
    """
    if not structure.config.bidirectional:
        return structure.bind(leaves).scores(dense_hidden(structure, leaves, token_ids)[-1:])[0]
    model = structure.bind_encoder(leaves)
    assert isinstance(model, TextClassifier), structure.config.architecture
    one = jnp.ones(1, jnp.int32)
    texts = Texts(token_ids[None, :], one * token_ids.shape[0], one * second_text)
    return model.scores(model(texts))[0]


def dense_attend(config: ModelConfig) -> AttendLayer:
    """Return a function for causal attention of one sequence to itself, in float32."""
    layers = config.mixers

    def attend(
        layer_index: int, heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Attend the heads of T tokens in one layer -> ([T, N, H], K and V [2, T, KH, H] for layers that read them)."""
        layer = layers[layer_index]
        if isinstance(heads, StateInputs):
            assert isinstance(layer, StateSpec)
            return _recurrence(layer, heads), None
        assert isinstance(layer, AttentionLayer)
        if heads.k is None or heads.v is None:
            assert isinstance(cache, jax.Array)
            kv = cache
        else:
            kv = jnp.stack([heads.k, heads.v])
        return _attention(layer, heads.q, kv[0], kv[1], sinks), kv

    return attend


def _recurrence(spec: StateSpec, inputs: StateInputs) -> jax.Array:
    """Fold the inputs of T tokens into a state that begins as zeros -> [T, heads, V]."""
    raw, weights = inputs
    before = jnp.zeros((spec.conv_width - 1, *raw.shape[1:]), raw.dtype)
    padded = jnp.concatenate([before, raw])[:, :, : spec.channels]
    taps = jnp.stack([padded[j : j + raw.shape[0]] for j in range(spec.conv_width)], axis=1)
    convolved = convolve(spec, taps, weights)
    if spec.kind == "convolution":
        return convolved.reshape(raw.shape[0], spec.heads, spec.v_dim).astype(raw.dtype)
    tokens = prepare(spec, convolved, raw[:, :, spec.channels :], weights)
    empty = jnp.zeros((spec.heads, spec.k_dim, spec.v_dim), jnp.float32)
    _, answers = jax.lax.scan(lambda state, token: advance(spec, state, token), empty, tokens)
    return with_skip(spec, answers, convolved, weights).astype(raw.dtype)


def _attention(spec: AttentionLayer, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """q [T, N, H], k and v [T, KH, H] -> [T, N, H]."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q.astype(jnp.float32), k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :]
    seen = distance >= 0
    if spec.sliding_window is not None:
        seen &= distance < spec.sliding_window
    if spec.chunk is not None:
        chunk = jnp.arange(tokens) // spec.chunk
        seen &= chunk[:, None] == chunk[None, :]
    scores = jnp.where(seen[None, :, :], scores, -jnp.inf)
    if sinks is not None:  # an extra column that takes part in the softmax and has no value
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (heads, tokens, 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[:, :, :-1]
    else:
        weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("nts,snh->tnh", weights, v).astype(q.dtype)
