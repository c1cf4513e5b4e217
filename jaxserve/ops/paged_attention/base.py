"""The attention contract that every backend keeps, and the page layout that all but the CPU's share.

Owns the metadata of a ragged batch, the static description of a layer and the interleaved layout. Knows no kernel.

A batch holds R rows and T packed query tokens. Row r owns the tokens [cu_q_lens[r], cu_q_lens[r + 1]) and sees the
first kv_lens[r] tokens of its pages, its own new tokens last:

    context of row r    0 ............................ kv_len - q_len ........ kv_len
                        |  written by earlier steps    |  this step's tokens   |

Token i of a row has the position kv_len - q_len + i and sees the positions up to its own (causal).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of one step stand. A pytree; all arrays are int32.

    Rows without tokens have q_len 0 and kv_len 0; tokens behind cu_q_lens[-1] are padding. Both give zeros.
    The width of `page_table` is its capacity only: no backend reads, or spends time on, pages behind kv_lens.
    Under a sliding window entries before what a row's first token sees may name any page, another row's or one that
    was never written: what lies there must not reach the result, and NaN neither.
    """

    page_table: jax.Array  # [R, max_pages]  page ids of a row's context, in order
    cu_q_lens: jax.Array  # [R + 1]  starts of the rows in the packed tokens
    kv_lens: jax.Array  # [R]  tokens of context after this step's are written; 0 for an empty row
    positions: jax.Array  # [T]  position of each token in its row
    slot_mapping: jax.Array  # [T]  page_id * page_size + offset to write; num_pages * page_size and above: none
    decode_only: bool = field(default=False, metadata={"static": True})  # T == R and token r is row r's only one
    # A row's bits must not depend on which others there are. Only the CPU's backend has a choice to make.
    alone: bool = field(default=False, metadata={"static": True})


@dataclass(frozen=True)
class AttentionSpec:
    """What is fixed of a layer's attention: static and hashable. `scale` multiplies the scores.

    With `sliding_window` w a token at position p sees the positions [p - w + 1, p]. With `soft_cap` c a score s
    becomes c * tanh(s / c), after the scale and before the mask.
    """

    scale: float
    num_kv_heads: int
    sliding_window: int | None = None
    soft_cap: float | None = None


class Backend(Protocol):
    """One way to store the pages of a layer and attend to them. Stateless: hashable, made by `get_backend`.

    Letters: T tokens, N query heads, KH kv heads (N = KH * G, query head n reads kv head n // G), D head dim.
    """

    @property
    def name(self) -> str:
        """The configuration's name of the backend."""
        ...

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        """Shape of one layer's cache array; the first axis is the page.

        `latent`: V is K, as in latent attention. A backend that can keeps it once; `write` and the others see by the
        cache's shape which it is.
        """
        ...

    def write(self, cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        """The cache with k and v [T, KH, D] at their slots; in place when the cache is donated."""
        ...

    def attend(
        self,
        q: jax.Array,
        cache: jax.Array,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of q [T, N, D] to the pages, which hold this step's tokens already: [T, N, D] in q's dtype.

        `sinks` [N]: a score per head that joins the softmax's denominator and has no value. Scores, softmax and
        accumulation are float32.
        """
        ...

    def export_pages(self, cache: jax.Array, page_ids: jax.Array, num_kv_heads: int) -> jax.Array:
        """Pages [n] in the form common to all backends: [n, page_size, 2 * KH, D], K of head h at 2h, V at 2h + 1;
        [n, page_size, KH, D] where V is K and kept once."""
        ...

    def import_pages(self, cache: jax.Array, page_ids: jax.Array, pages: jax.Array) -> jax.Array:
        """The cache with `pages`, in the common form, at page_ids [n]; ids of num_pages and above are dropped."""
        ...


def split_slots(slot_mapping: jax.Array, num_pages: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """(page, offset), each int32 [T]. Dropped slots get pages above num_pages, each its own: the scatter may then
    be told that its indices are unique, without which XLA on a GPU serialises it."""
    page = slot_mapping // page_size
    spare = num_pages + jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    return jnp.where(page < num_pages, page, spare), slot_mapping % page_size


class InterleavedLayout:
    """Pages [P, page_size, 2 * KH, D], K of head h at row 2h and V at 2h + 1: a token is one contiguous row. Where V
    is K, [P, page_size, KH, D]."""

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        return num_pages, page_size, num_kv_heads if latent else 2 * num_kv_heads, head_dim

    def write(self, cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        tokens, kv_heads, head_dim = k.shape
        page, offset = split_slots(slot_mapping, cache.shape[0], cache.shape[1])
        once = cache.shape[2] == kv_heads
        rows = k if once else jnp.stack([k, v], axis=2).reshape(tokens, 2 * kv_heads, head_dim)
        return cache.at[page, offset].set(rows.astype(cache.dtype), mode="drop", unique_indices=True)

    def export_pages(self, cache: jax.Array, page_ids: jax.Array, num_kv_heads: int) -> jax.Array:
        assert cache.shape[2] in (num_kv_heads, 2 * num_kv_heads)
        return cache.at[page_ids].get(mode="clip")

    def import_pages(self, cache: jax.Array, page_ids: jax.Array, pages: jax.Array) -> jax.Array:
        return cache.at[page_ids].set(pages.astype(cache.dtype), mode="drop")
