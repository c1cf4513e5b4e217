"""The order in which XLA keeps weights on a TPU: an axis of few outputs, as that of gate and up, comes first.

Nothing is padded so. Any other order would be a copy of the weight in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.ops.quantized import Quantized

SUBLANES = 32  # rows of bytes in a tile of the memory layout


def multiply_as_kept(product: Callable[[Quantized], jax.Array], w: Quantized) -> jax.Array:
    """Multiply T rows by w [*out, K] transposed, as it lies in memory -> [T, *out].

    product: multiplies them by a weight [N, K] -> [T, N].
    """
    if w.ndim > 2 and w.shape[-2] < SUBLANES:
        moved = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -2, 0), w)
        y = product(moved.matrix())
        return jnp.moveaxis(y.reshape(len(y), *moved.shape[:-1]), 1, -1)
    y = product(w.matrix())
    return y.reshape(len(y), *w.shape[:-1])
