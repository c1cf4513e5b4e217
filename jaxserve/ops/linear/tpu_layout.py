"""Multiplies by a weight in XLA's order on a TPU: an axis of few outputs, like gate and up, comes first.

In this order nothing is padded. Any other order would copy the weight in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.ops.quantized import Quantized

SUBLANES = 32  # rows of bytes in a tile of the memory layout


def multiply_as_kept(product: Callable[[Quantized], jax.Array], w: Quantized) -> jax.Array:
    """Multiply T rows by w [*out, K] transposed, in its order in memory -> [T, *out].

    product: multiplies the rows by a weight [N, K] -> [T, N]
    """
    if w.ndim > 2 and w.shape[-2] < SUBLANES:
        moved = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -2, 0), w)
        y = product(moved.matrix())
        return jnp.moveaxis(y.reshape(len(y), *moved.shape[:-1]), 1, -1)
    y = product(w.matrix())
    return y.reshape(len(y), *w.shape[:-1])
