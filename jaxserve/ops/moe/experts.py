"""The weights of a layer's routed experts, and the function between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxserve.ops.quantized import Quantized

Activation = Callable[[jax.Array, jax.Array], jax.Array]  # (gate, up) -> ffn input


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """Weights of E experts, which are converted to the rows' dtype. A bias is None if the model family has none."""

    gate_up: jax.Array | Quantized  # [E, F, 2, D]
    down: jax.Array | Quantized  # [E, D, F]
    gate_up_bias: jax.Array | None = None  # [E, F, 2]
    down_bias: jax.Array | None = None  # [E, D]
