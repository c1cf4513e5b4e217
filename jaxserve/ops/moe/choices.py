"""The experts that tokens chose: by token (Chosen), and in the order in which the kernels read them (Choices)."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Chosen(NamedTuple):
    """The experts of each token, and the weights of their results."""

    ids: jax.Array  # int32 [T, K]
    weights: jax.Array  # float32 [T, K]


class Choices(NamedTuple):
    """M choices of tokens, K for each token. Choice c belongs to token c // K."""

    order: jax.Array  # int32 [M]  the choice of each row, where rows are sorted by expert
    sizes: jax.Array  # int32 [E]  rows of each expert; the rows behind them have no expert
    weights: jax.Array  # float32 [M]  of each choice
    per_token: int  # K
