"""Parts shared by both XLA formulations of attention: reading tiles of the context, masks, the online softmax.

A tile is a whole number of pages of one row's context. The loops over rows and tiles are the callers'.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.ops.paged_attention.base import MASKED, AttentionSpec
from jaxserve.ops.paged_attention.scaled_pages import Pages, numbers


class TiledLayer(NamedTuple):
    """The loop-invariant inputs of one layer's attention."""

    cache: Pages  # [P, 2, page_size, KH * D], or [P, 1, ...] if V is K
    page_table: jax.Array  # [R, max_pages]
    spec: AttentionSpec
    sinks: jax.Array | None  # [N]
    num_heads: int
    head_dim: int
    tile: int  # tokens of context in one product, a whole number of pages


class Softmax(NamedTuple):
    """An online softmax over M query rows: running maximum [M], denominator [M], weighted sum of values [M, ...]."""

    top: jax.Array
    total: jax.Array
    values: jax.Array


def whole_pages(tokens: int, page_size: int) -> int:
    """Round `tokens` down to a whole number of pages, at least one page."""
    return max(1, tokens // page_size) * page_size


def read_tiles(
    layer: TiledLayer, row: jax.Array, tile: jax.Array, size: int, kv_len: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Read K and V of the first `size` tokens of each tile -> two float32 [*S, size, KH * D].

    row, tile and kv_len: int32 [*S]. Pages after the context are not read: the last page of the context is read
    again in their place, and the caller masks it.
    """
    num_pages, count, page_size, _ = layer.cache.shape
    page = jnp.arange(size // page_size, dtype=jnp.int32).reshape((1,) * tile.ndim + (-1,))
    column = tile[..., None] * (layer.tile // page_size) + page
    pages = layer.page_table[row[..., None], jnp.minimum(column, ((kv_len - 1) // page_size)[..., None])]

    def half(index: int) -> jax.Array:
        """Return K (0) or V (1) of the pages as float32 [*S, size, KH * D]."""

        def take(leaf: jax.Array) -> jax.Array:
            """Return this half of the pages of leaf [P, 2, page_size, KH * D] -> [*S, size, KH * D]."""
            halves = leaf.reshape(count * num_pages, page_size, leaf.shape[3])
            taken = numbers(halves.at[count * pages + index].get(mode="clip"))
            return taken.reshape(*tile.shape, size, leaf.shape[3])

        return jax.tree.map(take, layer.cache).astype(jnp.float32)

    k = half(0)
    return k, half(1) if count == 2 else k


def first_tile(layer: TiledLayer, position: jax.Array) -> jax.Array:
    """Return the first tile that a query at `position` sees, int32 [*S]; position int32 [*S]."""
    if layer.spec.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - layer.spec.sliding_window + 1, 0) // layer.tile


def sees(layer: TiledLayer, column: jax.Array, position: jax.Array) -> jax.Array:
    """Return whether the query at `position` sees the token at `column`, int32 [*S] each -> bool [*S]."""
    seen = column <= position
    if layer.spec.sliding_window is not None:
        seen &= column > position - layer.spec.sliding_window
    return seen


def begin(layer: TiledLayer, tokens: int, values_shape: tuple[int, ...]) -> Softmax:
    """Return the softmax before any tile. Sinks are already in it: each is a score whose value is zero."""
    rows = tokens * layer.num_heads
    if layer.sinks is None:
        top, total = jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32)
    else:
        top, total = jnp.tile(layer.sinks.astype(jnp.float32), tokens), jnp.ones((rows,), jnp.float32)
    return Softmax(top, total, jnp.zeros(values_shape, jnp.float32))


def capped(layer: TiledLayer, scores: jax.Array) -> jax.Array:
    """Apply the layer's soft cap, if it has one, to float32 scores [...]."""
    cap = layer.spec.soft_cap
    return scores if cap is None else jnp.tanh(scores / cap) * cap


def weigh(
    layer: TiledLayer, state: Softmax, scores: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Add scores float32 [M, tile] to the softmax; seen bool [M, tile].

    Returns the new maximum [M], the new denominator [M], the factor for the old values [M], the weights [M, tile].
    """
    scores = jnp.where(seen, capped(layer, scores), MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
    fade = jnp.exp(state.top - top)
    return top, state.total * fade + jnp.sum(weights, axis=1), fade, weights
