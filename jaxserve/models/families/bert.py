"""BERT (https://arxiv.org/abs/1810.04805), an encoder: each token of a text sees all others. No KV cache, no logits.

With a classification head it scores pairs of texts (ms-marco-MiniLM) or labels texts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import Json, head_labels, number, optional_integer
from jaxserve.models.config import ModelConfig
from jaxserve.models.encoder import Encoder, TextClassifier, Texts
from jaxserve.models.family import Family
from jaxserve.models.layers import LayerNorm, Linear
from jaxserve.models.weights import param
from jaxserve.ops.linear import Products


class Table(nnx.Module):
    """An embedding table, weight [rows, D]."""

    def __init__(self, rows: int, axis: str | None, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.weight = param((rows, config.hidden_size), (axis, "embed"), dtype)

    def __call__(self, index: jax.Array) -> jax.Array:
        return jnp.take(self.weight[...], index, axis=0, mode="clip")


class BertEmbeddings(nnx.Module):
    """The sum of word, absolute position and token type embeddings, then LayerNorm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.word_embeddings = Table(config.vocab_size, "vocab", config, dtype)
        self.position_embeddings = Table(config.max_position_embeddings + config.position_offset, None, config, dtype)
        self.token_type_embeddings = Table(config.type_vocab_size, None, config, dtype)
        self.LayerNorm = LayerNorm(config.hidden_size, config, dtype)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, types: jax.Array) -> jax.Array:
        """Embed token_ids, positions and token types, each int32 [T] -> [T, D]."""
        x = self.word_embeddings(token_ids) + self.position_embeddings(positions) + self.token_type_embeddings(types)
        return self.LayerNorm(x)


class SelfAttention(nnx.Module):
    """Bidirectional multi-head attention within each text."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        size = config.hidden_size, config.hidden_size
        self.heads = config.num_heads
        self.query = Linear(size, ("q_heads", "embed"), dtype, bias=True)
        self.key = Linear(size, ("q_heads", "embed"), dtype, bias=True)
        self.value = Linear(size, ("q_heads", "embed"), dtype, bias=True)

    def __call__(self, x: jax.Array, seen: jax.Array, linear: Products) -> jax.Array:
        """Attend x [R * L, D] -> [R * L, D]. seen: bool [R, L], False for padding."""
        split = (*seen.shape, self.heads, -1)
        q, k, v = (f(x, linear).reshape(split) for f in (self.query, self.key, self.value))
        scores = jnp.einsum("rtnh,rsnh->rnts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -1e30), axis=-1)
        out = jnp.einsum("rnts,rsnh->rtnh", weights, v.astype(jnp.float32))
        return out.reshape(x.shape[0], -1).astype(x.dtype)


class Output(nnx.Module):
    """norm(residual + dense(x)), after attention and after the feed-forward."""

    def __init__(self, size: int, axis: str, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.dense = Linear((config.hidden_size, size), ("embed", axis), dtype, bias=True)
        self.LayerNorm = LayerNorm(config.hidden_size, config, dtype)

    def __call__(self, x: jax.Array, residual: jax.Array, linear: Products) -> jax.Array:
        return self.LayerNorm(residual + self.dense(x, linear))


class BertAttention(nnx.Module):
    """The part that checkpoints call `attention`: `self` and `output`."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.self = SelfAttention(config, dtype)
        self.output = Output(config.hidden_size, "q_heads", config, dtype)

    def __call__(self, x: jax.Array, seen: jax.Array, linear: Products) -> jax.Array:
        return self.output(self.self(x, seen, linear), x, linear)


class Intermediate(nnx.Module):
    """gelu(dense(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.dense = Linear((config.intermediate_size, config.hidden_size), ("ffn", "embed"), dtype, bias=True)

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        return jax.nn.gelu(self.dense(x, linear), approximate=False)


class BertLayer(nnx.Module):
    """Attention and feed-forward, each with a LayerNorm after the residual."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.attention = BertAttention(config, dtype)
        self.intermediate = Intermediate(config, dtype)
        self.output = Output(config.intermediate_size, "ffn", config, dtype)

    def __call__(self, x: jax.Array, seen: jax.Array, linear: Products) -> jax.Array:
        x = self.attention(x, seen, linear)
        return self.output(self.intermediate(x, linear), x, linear)


class BertEncoder(nnx.Module):
    """The layers: the part that checkpoints call `encoder`."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.layer = nnx.List([BertLayer(config, dtype) for _ in range(config.num_layers)])


class Pooler(nnx.Module):
    """tanh(dense(first token))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.dense = Linear((config.hidden_size, config.hidden_size), (None, "embed"), dtype, bias=True)

    def __call__(self, hidden: jax.Array, linear: Products) -> jax.Array:
        """Pool hidden [R, L, D] -> float32 [R, D]."""
        return jnp.tanh(self.dense.in_float32(hidden[:, 0], linear))


class BertModel(Encoder):
    """The encoder: token ids -> hidden states. Attention scores need memory for [R, N, L, L]."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, pooler: bool = False) -> None:
        self.config = config
        self.embeddings = BertEmbeddings(config, dtype)
        self.encoder = BertEncoder(config, dtype)
        self.pooler = Pooler(config, dtype) if pooler else None

    def __call__(self, texts: Texts, linear: Products = Products()) -> jax.Array:
        """Encode the texts, see `Encoder`."""
        rows, longest = texts.token_ids.shape
        positions = jnp.tile(texts.places + self.config.position_offset, rows)
        x = self.embeddings(texts.token_ids.reshape(-1), positions, texts.types.reshape(-1))
        seen = texts.live
        for layer in self.encoder.layer:
            x = layer(x, seen, linear)
        return x.reshape(rows, longest, -1)


class BertForSequenceClassification(TextClassifier):
    """classifier(pooler(first token))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.bert = BertModel(config, dtype, pooler=True)
        self.classifier = Linear((len(config.labels), config.hidden_size), (None, "embed"), dtype, bias=True)

    @property
    def encoder(self) -> BertModel:
        return self.bert

    def scores(self, hidden: jax.Array, linear: Products = Products()) -> jax.Array:
        """Compute the head's scores from hidden [R, L, D] -> float32 [R, labels]."""
        assert self.bert.pooler is not None
        return self.classifier.in_float32(self.bert.pooler(hidden, linear), linear)


def encoder_fields(hf: Json) -> dict[str, Any]:
    """Return the fields of BERT and of the encoders with its layers. Raises ValueError for other positions."""
    if hf.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"position_embedding_type {hf['position_embedding_type']!r} is not supported")
    return {
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": number(hf, "layer_norm_eps", 1e-12),
        "bidirectional": True,
        "type_vocab_size": optional_integer(hf, "type_vocab_size", 2),
        "ignored_tensors": (r"position_ids$",),
    }


def _bert(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return encoder_fields(hf) | {"ignored_tensors": (r"^pooler\.", r"position_ids$")}


def _bert_classifier(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return encoder_fields(hf) | head_labels(hf)


FAMILIES = (
    Family("BertModel", BertModel, _bert),
    Family("BertForSequenceClassification", BertForSequenceClassification, _bert_classifier),
)
