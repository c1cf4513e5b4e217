"""The interface of encoders: bidirectional models of whole texts, with or without a classification head."""

from __future__ import annotations

from abc import abstractmethod

import jax
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.ops.linear import Products


class Encoder(nnx.Module):
    """Token ids -> hidden states of whole texts."""

    config: ModelConfig

    @abstractmethod
    def __call__(
        self,
        token_ids: jax.Array,
        lengths: jax.Array,
        seconds: jax.Array | None = None,
        linear: Products = Products(),
    ) -> jax.Array:
        """Encode token_ids int32 [R, L], of which the first lengths[r] count -> hidden [R, L, D].

        seconds: int32 [R], index of the first token of token type 1; 0 or None: all have type 0
        """


class TextClassifier(Encoder):
    """An encoder with a classification head."""

    @property
    @abstractmethod
    def encoder(self) -> Encoder:
        """The encoder without the head."""

    def __call__(
        self,
        token_ids: jax.Array,
        lengths: jax.Array,
        seconds: jax.Array | None = None,
        linear: Products = Products(),
    ) -> jax.Array:
        """Encode a batch of texts, see `Encoder`."""
        return self.encoder(token_ids, lengths, seconds, linear)

    @abstractmethod
    def scores(self, hidden: jax.Array, linear: Products = Products()) -> jax.Array:
        """Compute the head's numbers from hidden [R, L, D] -> float32 [R, labels]."""
