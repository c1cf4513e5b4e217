"""RoBERTa (https://arxiv.org/abs/1907.11692) and XLM-RoBERTa (https://arxiv.org/abs/1911.02116): BERT's layers.

Positions start behind the padding token's row, token types have no meaning, and the classification head has two layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import Json, head_labels, optional_integer
from jaxserve.models.config import ModelConfig
from jaxserve.models.encoder import TextClassifier
from jaxserve.models.families.bert import BertModel, encoder_fields
from jaxserve.models.family import Family
from jaxserve.models.layers import Linear
from jaxserve.ops.linear import Products


class RobertaHead(nnx.Module):
    """out_proj(tanh(dense(first token)))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        size = config.hidden_size
        self.dense = Linear((size, size), (None, "embed"), dtype, bias=True)
        self.out_proj = Linear((len(config.labels), size), (None, "embed"), dtype, bias=True)

    def __call__(self, hidden: jax.Array, linear: Products) -> jax.Array:
        """Compute the scores from hidden [R, L, D] -> float32 [R, labels]."""
        return self.out_proj.in_float32(jnp.tanh(self.dense.in_float32(hidden[:, 0], linear)), linear)


class RobertaForSequenceClassification(TextClassifier):
    """The encoder and its head."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.roberta = BertModel(config, dtype)
        self.classifier = RobertaHead(config, dtype)

    @property
    def encoder(self) -> BertModel:
        return self.roberta

    def scores(self, hidden: jax.Array, linear: Products = Products()) -> jax.Array:
        """Compute the head's scores from hidden [R, L, D] -> float32 [R, labels]."""
        return self.classifier(hidden, linear)


def _roberta(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    offset = 1 if hf.get("pad_token_id") == 0 else optional_integer(hf, "pad_token_id", 1) + 1
    return encoder_fields(hf) | {
        "position_offset": offset,
        "max_position_embeddings": fields["max_position_embeddings"] - offset,
        "ignored_tensors": (r"^(roberta\.)?pooler\.", r"position_ids$"),
    }


def _classifier(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    return _roberta(hf, fields) | head_labels(hf)


FAMILIES = (
    Family("RobertaModel", BertModel, _roberta),
    Family("XLMRobertaModel", BertModel, _roberta),
    Family("RobertaForSequenceClassification", RobertaForSequenceClassification, _classifier),
    Family("XLMRobertaForSequenceClassification", RobertaForSequenceClassification, _classifier),
)
