"""The shared parts of the Triton attention kernels: the online softmax and the join of splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.ops.paged_attention.base import MASKED, AttentionSpec
from jaxserve.ops.paged_attention.split_kv import LOG2E
from jaxserve.ops.triton_arrays import dot, index_grid, load, mask_of, padded


def places(
    table: Callable[[jax.Array], jax.Array], token: jax.Array, page_size: int, ends: tuple[jax.Array | int, jax.Array]
) -> jax.Array:
    """Return the slots of the positions `token` int32 [tile] of a row: page * page_size + offset.

    Positions outside `ends`, the first and the last position that the row sees, give the nearer of the two. A clamped
    gather needs no mask and reads no page outside of the context: another request's page may hold NaN, and 0 * NaN is
    NaN. A mask on V would also keep Triton from buffering the loads. `table(page)` reads the row's page table.
    """
    token = jnp.clip(token, ends[0], ends[1])
    # lax.div and lax.rem: positions are not negative, and // would add code for signs.
    return table(lax.div(token, page_size)) * page_size + lax.rem(token, page_size)


class Base2Softmax(NamedTuple):
    """An online softmax over M rows in base 2: weighted sums of values, maximum [M], denominator [M].

    The sums are arrays [M, columns], one for each part of the columns.
    """

    values: tuple[jax.Array, ...]
    top: jax.Array
    total: jax.Array


def empty(rows: int, *columns: int) -> Base2Softmax:
    """Return the softmax over nothing of `rows` rows, with values in parts of so many columns."""
    values = tuple(jnp.zeros((rows, part), jnp.float32) for part in columns)
    return Base2Softmax(values, jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32))


def finish(state: Base2Softmax) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return the outputs [M, columns], zeros for a row that saw nothing, and the base-2 log-sum-exp [M]."""
    total = jnp.maximum(state.total, 1e-30)
    return tuple(values / total[:, None] for values in state.values), state.top + jnp.log2(total)


class Scales(NamedTuple):
    """The scales of a tile of 8-bit pages, float32 [tile]; None: the pages are not quantized."""

    k: jax.Array | None = None
    v: jax.Array | None = None


def add_tile(
    state: Base2Softmax, scores: jax.Array, values: tuple[jax.Array, ...], scales: Scales, spec: AttentionSpec, seen
) -> Base2Softmax:
    """Add one tile of context: products of queries and keys float32 [M, tile], values in parts [tile, columns].

    seen: bool [M or 1, tile]; None if all is seen. Scales multiply the scores and the weights, which have fewer
    elements than K and V.
    """
    scores = scores * spec.scale
    if scales.k is not None:
        scores *= scales.k[None, :]
    if spec.soft_cap is not None:
        scores = jnp.tanh(scores / spec.soft_cap) * spec.soft_cap
    scores *= LOG2E
    if seen is not None:
        scores = jnp.where(seen, scores, MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - top[:, None])
    if seen is not None:
        weights = jnp.where(seen, weights, 0.0)
    fade = jnp.exp2(state.top - top)
    scaled = weights if scales.v is None else weights * scales.v[None, :]
    sums = tuple(
        old * fade[:, None] + dot(scaled.astype(v.dtype), v, (1, 0))
        for old, v in zip(state.values, values, strict=True)
    )
    return Base2Softmax(sums, top, state.total * fade + jnp.sum(weights, axis=1))


def join(out: jax.Array, lse: jax.Array, sinks: jax.Array | None, dtype: jnp.dtype, *, interpret: bool) -> jax.Array:
    """Do `join_splits` in one kernel: out [R, S, KH, G, D], lse [R, S, KH, G] -> [R, KH, G, D]. XLA takes three."""
    rows, splits, kv_heads, group, head_dim = out.shape
    own = (None, None, group, head_dim)
    in_specs = [
        pl.BlockSpec((None, splits, None, group, head_dim), lambda r, h: (r, 0, h, 0, 0)),
        pl.BlockSpec((None, splits, None, group), lambda r, h: (r, 0, h, 0)),
    ]
    args = [out, lse]
    if sinks is not None:
        in_specs.append(pl.BlockSpec((None, group), lambda r, h: (h, 0)))
        args.append(sinks.astype(jnp.float32).reshape(kv_heads, group) * LOG2E)
    return pl.pallas_call(
        _join_kernel,
        grid=(rows, kv_heads),
        in_specs=in_specs,
        out_specs=pl.BlockSpec(own, lambda r, h: (r, h, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, kv_heads, group, head_dim), dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_join",
    )(*args)


def _join_kernel(out_ref, lse_ref, *refs) -> None:
    """Join out_ref [S, G, D] by lse_ref float32 [S, G]. refs: the sinks [G] in base 2, if there are any; the result"""
    *sink_ref, joined_ref = refs
    splits = jnp.arange(out_ref.shape[0], dtype=jnp.int32)
    (heads, head_limit), (columns, column_limit) = padded(out_ref.shape[1]), padded(out_ref.shape[2])
    lse = load(lse_ref, index_grid(splits, heads), (None, head_limit))
    # Sinks are one more split, whose output is zero.
    sink = load(sink_ref[0], (heads,), (head_limit,)) if sink_ref else jnp.full((heads.shape[0],), MASKED, jnp.float32)
    top = jnp.maximum(jnp.max(lse, axis=0), sink)
    weights = jnp.exp2(lse - top[None, :])
    total = jnp.sum(weights, axis=0) + jnp.exp2(sink - top)
    out = load(out_ref, index_grid(splits, heads, columns), (None, head_limit, column_limit))
    joined = jnp.sum(out * weights[:, :, None], axis=0) / total[:, None]
    own, limits = index_grid(heads, columns), (head_limit, column_limit)
    plt.store(joined_ref.at[own], joined.astype(joined_ref.dtype), mask=mask_of(own, limits))
