"""The interface of encoders: bidirectional models of whole texts, with or without a classification head."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.ops.linear import Products


class Texts(NamedTuple):
    """A batch of R whole texts, padded to L tokens."""

    token_ids: jax.Array  # int32 [R, L]
    lengths: jax.Array  # int32 [R]  the tokens that count
    seconds: jax.Array | None = None  # int32 [R]  first token of token type 1; 0 or None: all have type 0

    @property
    def places(self) -> jax.Array:
        """Return the index of each token in its text, int32 [L]."""
        return jnp.arange(self.token_ids.shape[1], dtype=jnp.int32)

    @property
    def live(self) -> jax.Array:
        """Return whether each token counts, bool [R, L]."""
        return self.places[None, :] < self.lengths[:, None]

    @property
    def types(self) -> jax.Array:
        """Return each token's type, int32 [R, L]."""
        first = jnp.zeros_like(self.lengths) if self.seconds is None else self.seconds
        return ((self.places[None, :] >= first[:, None]) & (first[:, None] > 0)).astype(jnp.int32)


class Encoder(nnx.Module):
    """Token ids -> hidden states of whole texts."""

    config: ModelConfig

    @abstractmethod
    def __call__(self, texts: Texts, linear: Products = Products()) -> jax.Array:
        """Encode the texts -> hidden [R, L, D]."""


class TextClassifier(Encoder):
    """An encoder with a classification head."""

    @property
    @abstractmethod
    def encoder(self) -> Encoder:
        """Return the encoder without the head."""

    def __call__(self, texts: Texts, linear: Products = Products()) -> jax.Array:
        """Encode the texts, see `Encoder`."""
        return self.encoder(texts, linear)

    @abstractmethod
    def scores(self, hidden: jax.Array, linear: Products = Products()) -> jax.Array:
        """Compute the head's scores from hidden [R, L, D] -> float32 [R, labels]."""
