"""Work lists against a plain enumeration, over random ragged batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.ops.paged_attention import AttentionMetadata
from jaxserve.ops.paged_attention.ragged import QueryBlocks, max_blocks, query_blocks, row_of_tokens, rows_of

TOKENS = 40  # one shape for all examples: a new one is a new program


def _metadata(q_lens: list[int]) -> AttentionMetadata:
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    tokens = jnp.zeros(TOKENS, jnp.int32)
    table = jnp.zeros((len(q_lens), 1), jnp.int32)
    return AttentionMetadata(table, jnp.asarray(starts), jnp.asarray(q_lens, jnp.int32), tokens, tokens)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _lists(metadata: AttentionMetadata, block: int, least: int) -> tuple[QueryBlocks, jax.Array]:
    rows = rows_of(metadata)
    return query_blocks(rows, TOKENS, block, least), row_of_tokens(rows, TOKENS)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 10), min_size=4, max_size=4), st.sampled_from([1, 4]), st.sampled_from([1, 2]))
def test_blocks_cover_each_token_once(q_lens: list[int], block: int, least: int) -> None:
    blocks, row_of = _lists(_metadata(q_lens), block, least)
    want = [(row, first) for row, n in enumerate(q_lens) if n >= least for first in range(0, n, block)]
    live = np.asarray(blocks.live)
    got = list(zip(np.asarray(blocks.row)[live].tolist(), np.asarray(blocks.first)[live].tolist(), strict=True))
    assert got == want and live[: len(want)].all()
    assert len(want) <= max_blocks(TOKENS, len(q_lens), block, least)
    owners = np.repeat(np.arange(len(q_lens)), q_lens).tolist() + [len(q_lens)] * (TOKENS - sum(q_lens))
    assert np.asarray(row_of).tolist() == owners
