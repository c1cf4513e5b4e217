"""The weights of a layer's routed experts, and the function between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxserve.ops.quantized import Quantized

Activation = Callable[..., jax.Array]  # (gate, up) -> ffn input; (up) for experts without a gate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """Weights of E experts, which are converted to the rows' dtype. A bias is None if the model family has none."""

    gate_up: jax.Array | Quantized  # [E, F, 2, D]; [E, F, 1, D]: up alone, which no kernel for a TPU takes
    down: jax.Array | Quantized  # [E, D, F]
    gate_up_bias: jax.Array | None = None  # [E, F, 2]
    down_bias: jax.Array | None = None  # [E, D]


def unscaled(weight: jax.Array | Quantized) -> tuple[jax.Array | Quantized, jax.Array | None]:
    """Return a weight without the scales of its tensors, and these scales, float32 [E, .., 1]; None: it has none."""
    if not isinstance(weight, Quantized):
        return weight, None
    return weight.unscaled(), weight.tensor_scale
