"""One Triton kernel between a layer's projection to q, k and v and its attention.

It norms each query and key head, rotates them, and writes K and V into the cache; XLA makes two to five kernels of
this. A program has one token and one kv head, with the query heads that share it. Values are rounded where XLA's form
rounds them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.ops.paged_attention.base import ProjectedHeads
from jaxserve.ops.triton_arrays import index_grid, load, mask_of, padded

_WARPS = 4


def write_heads(
    heads: ProjectedHeads, cache: jax.Array, slot_mapping: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Write K and V of heads [T, KH, G + 2, D] to cache [P, page_size, 2 * KH, D] at slot_mapping int32 [T].

    Returns q [T, KH * G, D], normed and rotated, and the cache.
    """
    count, kv_heads, rows, head_dim = heads.rows.shape
    group = rows - 2
    tokens = cache.reshape(cache.shape[0] * cache.shape[1], kv_heads, 2, head_dim)
    table = [] if heads.table is None else list(heads.table)
    norms = [] if heads.norms is None else list(heads.norms)
    in_cache = pl.BlockSpec((tokens.shape[0], None, 2, head_dim), lambda t, h: (0, h, 0, 0))
    inputs = [heads.rows, slot_mapping, *table, *norms, tokens]
    q, tokens = pl.pallas_call(
        functools.partial(_kernel, heads=heads, group=group),
        grid=(count, kv_heads),
        in_specs=[
            pl.BlockSpec((None, None, rows, head_dim), lambda t, h: (t, h, 0, 0)),
            pl.BlockSpec((None,), lambda t, h: (t,)),
            *(pl.BlockSpec((None, x.shape[1]), lambda t, h: (t, 0)) for x in table),
            *(pl.BlockSpec(x.shape, lambda t, h: (0,)) for x in norms),
            in_cache,
        ],
        out_specs=[pl.BlockSpec((None, None, group, head_dim), lambda t, h: (t, h, 0, 0)), in_cache],
        out_shape=[
            jax.ShapeDtypeStruct((count, kv_heads, group, head_dim), heads.rows.dtype),
            jax.ShapeDtypeStruct(tokens.shape, tokens.dtype),
        ],
        input_output_aliases={len(inputs) - 1: 1},
        compiler_params=plt.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="paged_heads",
    )(*inputs)
    return q.reshape(count, kv_heads * group, head_dim), tokens.reshape(cache.shape)


def _kernel(
    rows_ref,  # [G + 2, D]: query heads, K, V
    slot_ref,  # int32 []
    # cos and sin float32 [r / 2] if heads are rotated, weights [D] of q's and k's norm if they are normed
    # pages [P * page_size, 2, D] of this kv head
    # q [G, D], and the pages
    *refs,
    heads: ProjectedHeads,
    group: int,
) -> None:
    *refs, _, q_ref, pages_ref = refs
    half = 0 if heads.table is None else heads.table[0].shape[1]
    q_norm, k_norm = refs[-2:] if heads.norms is not None else (None, None)
    (row, row_limit), (column, column_limit) = padded(group), padded(rows_ref.shape[1])
    rotation = _Rotation.of(column, half, heads.interleaved)

    def ready(rows: jax.Array, limit: int | None, norm_ref) -> jax.Array:
        """Return the heads `rows`, int32 [M], normed and rotated: [M, D]."""
        x = load(rows_ref, index_grid(rows, column), (limit, column_limit))
        scale = None
        if norm_ref is not None:
            wide = x.astype(jnp.float32)
            scale = lax.rsqrt(jnp.sum(wide * wide, axis=1) / rows_ref.shape[1] + heads.eps)

        def normed(x: jax.Array, columns: jax.Array) -> jax.Array:
            """Norm x [M, D], the columns int32 [D] of these heads, and round: float32."""
            if scale is None:
                return x.astype(jnp.float32)
            weight = load(norm_ref, (columns,), (column_limit,)).astype(jnp.float32) + heads.offset
            return (x.astype(jnp.float32) * scale[:, None] * weight[None]).astype(x.dtype).astype(jnp.float32)

        y = normed(x, column)
        if not half:
            return y.astype(x.dtype)
        cos, sin = (plt.load(ref.at[rotation.angle])[None] for ref in refs[:2])
        partner = normed(load(rows_ref, index_grid(rows, rotation.partner), (limit, column_limit)), rotation.partner)
        rotated = y * cos + partner * jnp.where(rotation.first[None], -sin, sin)
        return jnp.where((column < 2 * half)[None], rotated, y).astype(x.dtype)

    own = index_grid(row, column)
    plt.store(q_ref.at[own], ready(row, row_limit, q_norm), mask=mask_of(own, (row_limit, column_limit)))

    @pl.when(slot_ref[()] < pages_ref.shape[0])
    def _write() -> None:
        one = jnp.arange(1, dtype=jnp.int32)
        k = ready(one + group, None, k_norm)
        v = load(rows_ref, index_grid(one + group + 1, column), (None, column_limit))
        for kept, x in enumerate((k, v)):
            place = index_grid(one + slot_ref[()], one + kept, column)
            mask = mask_of(place, (None, None, column_limit))
            plt.store(pages_ref.at[place], x[:, None].astype(pages_ref.dtype), mask=mask)


class _Rotation(NamedTuple):
    """The rotation of columns [D]: each one's partner column, its angle, and whether it is the first of its pair."""

    partner: jax.Array
    angle: jax.Array
    first: jax.Array

    @classmethod
    def of(cls, column: jax.Array, half: int, interleaved: bool) -> _Rotation:
        """column: int32 [D]. half: pairs of columns. The columns behind the pairs are their own partners."""
        rotated = column < 2 * half
        if interleaved:
            first = column % 2 == 0
            angle = column // 2
            partner = jnp.where(first, column + 1, column - 1)
        else:
            first = column < half
            angle = jnp.where(first, column, column - half)
            partner = jnp.where(first, column + half, column - half)
        return cls(jnp.where(rotated, partner, column), jnp.where(rotated, angle, 0), first)
