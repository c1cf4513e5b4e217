"""Which experts the tokens chose, in the order in which the kernels take them; and which kernels these are."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Chosen(NamedTuple):
    """The experts of each token, and what their results are multiplied by."""

    ids: jax.Array  # int32 [T, K]
    weights: jax.Array  # float32 [T, K]


class Choices(NamedTuple):
    """M choices of tokens, K of each. Choice c is of token c // K."""

    order: jax.Array  # int32 [M]  the choice of each row, where rows are sorted by expert
    sizes: jax.Array  # int32 [E]  rows of each expert; the rows behind them are of no expert
    weights: jax.Array  # float32 [M]  of each choice
    per_token: int  # K
