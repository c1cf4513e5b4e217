"""Work lists of a ragged batch: the blocks of queries, and the rows that have only one token.

They are computed on the device from AttentionMetadata. They are the same for every layer, so XLA computes them once per
step. Backends import this file; it knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.ops.paged_attention.base import AttentionMetadata


class Rows(NamedTuple):
    """First packed token, number of tokens and context length of each row, int32 [R]. An empty row has q_len 0."""

    start: jax.Array
    q_len: jax.Array
    kv_len: jax.Array


class QueryBlocks(NamedTuple):
    """Blocks of consecutive tokens of one row, in the order of their tokens. Unused entries come last."""

    row: jax.Array  # int32 [B], 0 if unused
    first: jax.Array  # int32 [B]  index in its row of the block's first token, 0 if unused
    live: jax.Array  # bool [B]  whether the entry is used


def rows_of(metadata: AttentionMetadata) -> Rows:
    kv_lens = metadata.kv_lens
    if metadata.decode_only:
        return Rows(jnp.arange(kv_lens.shape[0], dtype=jnp.int32), (kv_lens > 0).astype(jnp.int32), kv_lens)
    q_lens = metadata.cu_q_lens[1:] - metadata.cu_q_lens[:-1]
    return Rows(metadata.cu_q_lens[:-1], jnp.where(kv_lens > 0, q_lens, 0), kv_lens)


def max_blocks(num_tokens: int, num_rows: int, block: int, min_tokens: int) -> int:
    """Return the largest number of blocks that `num_tokens` tokens can need, however they are spread over the rows.

    At most `num_rows` rows have `min_tokens` or more tokens; only those are cut into blocks.
    """
    return max(1, num_tokens // block + min(num_rows, num_tokens // min_tokens))


def query_blocks(rows: Rows, num_tokens: int, block: int, min_tokens: int) -> QueryBlocks:
    """Cut each row of at least `min_tokens` tokens into blocks of `block` tokens. The last block may be shorter."""
    num_rows = rows.q_len.shape[0]
    blocks = jnp.where(rows.q_len >= min_tokens, (rows.q_len + block - 1) // block, 0)
    ends = jnp.cumsum(blocks)
    index = jnp.arange(max_blocks(num_tokens, num_rows, block, min_tokens), dtype=jnp.int32)
    live = index < ends[-1]
    row = jnp.where(live, jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32), 0)
    first = jnp.where(live, (index - ends[row] + blocks[row]) * block, 0)
    return QueryBlocks(row, first, live)


def row_of_tokens(rows: Rows, num_tokens: int) -> jax.Array:
    """Return int32 [T]: the row of each token, R for a token of no row."""
    num_rows = rows.q_len.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    inside = (token >= rows.start[None]) & (token < (rows.start + rows.q_len)[None])
    return jnp.min(jnp.where(inside, jnp.arange(num_rows, dtype=jnp.int32)[None], num_rows), axis=1)


def attend_ragged(
    q: jax.Array,
    metadata: AttentionMetadata,
    decode: Callable[[jax.Array, jax.Array], jax.Array],
    extend: Callable[[jax.Array, Rows], jax.Array],
) -> jax.Array:
    """Attend q [T, N, D] -> [T, N, D]: rows of one token by `decode`, rows of several by `extend`. Zeros elsewhere.

    decode: (q [R, N, D], kv_lens int32 [R]) -> [R, N, D]. extend: (q [T, N, D], rows) -> [T, N, D], of which only the
    tokens of rows of several are read. Both results become one in a single pass.
    """
    rows = rows_of(metadata)
    kv_lens = jnp.where(rows.q_len == 1, rows.kv_len, 0)
    if metadata.decode_only:
        return decode(q, kv_lens)
    out = extend(q, rows)
    single = decode(q.at[rows.start].get(mode="clip"), kv_lens)
    row = row_of_tokens(rows, q.shape[0])
    q_len = rows.q_len.at[row].get(mode="fill", fill_value=0)
    own = single.at[jnp.where(q_len == 1, row, len(single))].get(mode="fill", fill_value=0)
    return jnp.where((q_len > 1)[:, None, None], out, own)
