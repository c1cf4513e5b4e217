"""The shared parts of the kernels for NVIDIA GPUs: a layer's inputs, and contexts that are cut into splits.

The context of a row is cut into splits so that few rows also fill the GPU. Each split gives its normalized output and
the base-2 log-sum-exp of its scores (flash decoding, https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxserve.ops.paged_attention.base import AttentionSpec
from jaxserve.ops.paged_attention.scaled_pages import Pages

LOG2E = math.log2(math.e)
PROGRAMS = 528  # programs that should fill a GPU: four for each of an H200's 132 multiprocessors
_MAX_SPLITS = 16


class LayerPages(NamedTuple):
    """The inputs of both kernels."""

    cache: Pages  # [P, page_size, 2 * KH, D]
    page_table: jax.Array  # int32 [R, max_pages]
    spec: AttentionSpec
    sinks: jax.Array | None  # [N]

    @property
    def tokens(self) -> Pages:
        """Return the pages as [P * page_size, KH, 2, D], or [..., 1, D] if V is K, without a copy.

        The scales of 8-bit pages are [P * page_size, KH, 2, 1].
        """
        pages, page_size = self.cache.shape[:2]
        heads = pages * page_size, self.spec.num_kv_heads, -1
        return jax.tree.map(lambda leaf: leaf.reshape(*heads, leaf.shape[3]), self.cache)


def num_splits(programs: int, num_blocks: int, max_context: int, split_tokens: int) -> int:
    """Return the number of splits: a power of two, so that num_blocks * splits programs fill the GPU.

    programs: the number that fills it. A split has at least `split_tokens` tokens of the longest context, max_context.
    It depends on shapes only and never on the rows of the step, so a row is always summed in the same order.
    """
    wanted, longest = pl.cdiv(programs, num_blocks), max(1, max_context // split_tokens)
    return 1 << (min(wanted, longest, _MAX_SPLITS).bit_length() - 1)


def join_splits(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Join the splits: out [R, S, N, D] weighted by lse, their base-2 log-sum-exp float32 [R, S, N] -> [R, N, D]."""
    if out.shape[1] == 1 and sinks is None:
        return out[:, 0]
    if sinks is not None:  # sinks are one more split, whose output is zero
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, None] * LOG2E, (lse.shape[0], 1, lse.shape[2]))
        lse = jnp.concatenate([lse, sink], axis=1)
    weights = jnp.exp2(lse - jnp.max(lse, axis=1, keepdims=True))
    joined = jnp.sum(out.astype(jnp.float32) * weights[:, : out.shape[1], :, None], axis=1)
    return joined / jnp.sum(weights, axis=1)[..., None]
