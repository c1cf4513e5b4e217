"""Helpers for every Pallas kernel for Triton: indices, masked loads, and products.

Triton accepts only shapes that are powers of two; other sizes use masked loads and stores. Import this file only where
a kernel is chosen: not every build of jax has Pallas' Triton modules.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

TENSOR_CORE_ROWS = 16  # fewest rows of a Triton dot


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Return the product [M, N] of two matrices in float32. float32 operands are not rounded to TF32.

    contract: the axis of length K of a, and of b
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def index_grid(*sizes: jax.Array) -> tuple[jax.Array, ...]:
    """Return the index arrays of a gather: argument i varies along axis i and is broadcast over the others."""
    shape = tuple(size.shape[0] for size in sizes)
    return tuple(lax.broadcast_in_dim(size, shape, (axis,)) for axis, size in enumerate(sizes))


def load(ref, indices: tuple[jax.Array | int, ...], limits: tuple[int | None, ...]) -> jax.Array:
    """Load ref[indices], with zero for an index at or above its axis's limit. Limit None: no index reaches it."""
    mask = mask_of(indices, limits)
    return plt.load(ref.at[indices]) if mask is None else plt.load(ref.at[indices], mask=mask, other=0)


def mask_of(indices: tuple[jax.Array | int, ...], limits: tuple[int | None, ...]) -> jax.Array | None:
    """Return where all indices [...] are below the limits of their axes; None if no axis has one."""
    inside = [jnp.less(index, limit) for index, limit in zip(indices, limits, strict=True) if limit is not None]
    return functools.reduce(jnp.logical_and, inside) if inside else None


def padded(size: int, least: int = 1) -> tuple[jax.Array, int | None]:
    """Return the indices of an axis, padded to a power of two, and the limit for masks: None if none was added."""
    padded = max(least, pl.next_power_of_2(size))
    return jnp.arange(padded, dtype=jnp.int32), None if padded == size else size
