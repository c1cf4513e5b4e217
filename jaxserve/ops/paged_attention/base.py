"""The interface of attention backends, and the page layout of the reference and the NVIDIA GPU backends.

It defines the metadata of a ragged batch, the static description of a layer and the interleaved layout. No kernel.

A batch has R rows and T packed query tokens. Row r owns the tokens [cu_q_lens[r], cu_q_lens[r + 1]). It sees the
first kv_lens[r] tokens of its pages, the last of which are its own new tokens:

    context of row r    0 ............................ kv_len - q_len ........ kv_len
                        |  written by earlier steps    |  this step's tokens   |

Token i of a row has the position kv_len - q_len + i and sees the positions up to its own (causal).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxserve.ops.paged_attention.scaled_pages import Pages, stored

MASKED = -1e30  # a masked score: finite, so that the difference of two is 0 and not NaN


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """The rows, lengths and page tables of one step. A pytree; all arrays are int32.

    A row without tokens has q_len 0 and kv_len 0. Tokens after cu_q_lens[-1] are padding. Both give zeros.
    The width of `page_table` is a capacity: no backend reads, or spends time on, pages after kv_lens.
    With a sliding window or chunks, entries before the first position that the row sees may name any page, for example
    one of another row or one never written. Their content, NaN included, must not reach the result.
    """

    page_table: jax.Array  # [R, max_pages]  page ids of a row's context, in order
    cu_q_lens: jax.Array  # [R + 1]  starts of the rows in the packed tokens
    kv_lens: jax.Array  # [R]  tokens of context after this step's are written; 0 for an empty row
    positions: jax.Array  # [T]  position of each token in its row
    slot_mapping: jax.Array  # [T]  page_id * page_size + offset to write; num_pages * page_size and above: none
    decode_only: bool = field(default=False, metadata={"static": True})  # T == R, and token r is row r's only token
    # Batch invariance: a row's bits must not depend on the other rows. Only the XLA backend has two ways to compute.
    alone: bool = field(default=False, metadata={"static": True})


@dataclass(frozen=True)
class AttentionSpec:
    """The static description of a layer's attention. Hashable. Scores are multiplied by `scale`.

    With `sliding_window` w, a token at position p sees the positions [p - w + 1, p]. With `chunk` c it sees
    [p - p % c, p]. A layer has at most one of the two. With `soft_cap` c, a score s becomes c * tanh(s / c), after the
    scale and before the mask. With `value_columns` n, the caller needs only the first n columns of V, and a backend may
    return only these, [T, N, n].
    """

    scale: float
    num_kv_heads: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    value_columns: int | None = None
    chunk: int | None = None

    @property
    def sees_all(self) -> bool:
        """Whether a token sees every position before it. If not, use the methods below."""
        return self.sliding_window is None and self.chunk is None

    def oldest(self, position: jax.Array) -> jax.Array:
        """Return the first position that the token at `position` sees, int32 [*S]."""
        if self.chunk is not None:
            return jnp.maximum(position, 0) // self.chunk * self.chunk
        assert self.sliding_window is not None
        return jnp.maximum(position - self.sliding_window + 1, 0)

    def oldest_before(self, end: jax.Array) -> jax.Array:
        """Return the first position that the last token before `end` sees, int32 [*S]."""
        if self.chunk is not None:
            return self.oldest(end - 1)
        assert self.sliding_window is not None
        return jnp.maximum(end - self.sliding_window, 0)

    def reaches(self, column: jax.Array, position: jax.Array) -> jax.Array:
        """Return whether `column` is not before the first position that the token at `position` sees, bool [*S]."""
        if self.chunk is not None:
            return column >= self.oldest(position)
        assert self.sliding_window is not None
        return column > position - self.sliding_window


@dataclass(frozen=True)
class ProjectedHeads:
    """A layer's projection to q, k and v, with the norm and the rotation that must still be applied before attention.

    norms: weights [D] of the RMSNorm of each query and of each key head, in float32 multiplied by x / rms(x) after
    `offset` is added. table: cos and sin of the rotation, float32 [T, r / 2], see `models.rope`.
    """

    rows: jax.Array  # [T, KH, G + 2, D]  the query heads of a kv head, its K and its V
    norms: tuple[jax.Array, jax.Array] | None
    eps: float
    offset: float
    table: tuple[jax.Array, jax.Array] | None
    interleaved: bool


class Heads(NamedTuple):
    """A layer's q [T, N, D], k and v [T, KH, D], ready for attention.

    k and v are None in a layer that reads another layer's cache: it writes nothing.
    projected: the same before norm and rotation, for a backend that does both itself; None: not available
    """

    q: jax.Array
    k: jax.Array | None
    v: jax.Array | None
    projected: ProjectedHeads | None = None


@runtime_checkable
class WritesHeads(Protocol):
    """A backend that norms, rotates and writes in one kernel, on one device."""

    def write_heads(
        self, heads: ProjectedHeads, cache: jax.Array, slot_mapping: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return q [T, N, D], ready for attention, and the cache with K and V at slot_mapping int32 [T]."""
        ...


class Backend(Protocol):
    """A layout of the pages of a layer, and the kernels that write and attend to it. Stateless and hashable.

    Axes: T tokens, N query heads, KH kv heads, D head_dim. N = KH * G, and query head n reads kv head n // G.
    """

    @property
    def name(self) -> str:
        """Return the backend's name in the configuration."""
        ...

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of one layer's cache array. The first axis is the page.

        latent: V is K, as in multi-head latent attention (MLA). A backend may then store it once; the other methods
        tell by the cache's shape. Raises ConfigError if the backend cannot serve these sizes.
        """
        ...

    def scale_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of the scales of 8-bit pages, of the same rank as `cache_shape` with heads at the same axis.

        Raises ConfigError if the backend cannot serve such pages.
        """
        ...

    def held_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """Return the dtype of the array that stores pages of a dtype: unsigned integers if it stores their bits."""
        ...

    def write(self, cache: Pages, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pages:
        """Return the cache with k and v [T, KH, D] written at slot_mapping int32 [T]. In place if it is donated."""
        ...

    def attend(
        self,
        q: jax.Array,
        cache: Pages,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the attention of q [T, N, D] to the pages -> [T, N, D] in q's dtype.

        The pages already hold this step's tokens. sinks [N]: a score per head that is added to the softmax's
        denominator and has no value. Scores, softmax and accumulation are float32.
        """
        ...

    def export_pages(self, cache: Pages, page_ids: jax.Array, num_kv_heads: int) -> Pages:
        """Return pages page_ids int32 [n] in the form common to all backends: [n, page_size, 2 * KH, D].

        K of head h is at row 2h and V at 2h + 1. If V is K and stored once, the form is [n, page_size, KH, D].
        Scales of 8-bit pages have the form of a head_dim of 1.
        """
        ...

    def import_pages(self, cache: Pages, page_ids: jax.Array, pages: Pages) -> Pages:
        """Return the cache with `pages`, in the form of `export_pages`, at page_ids int32 [n].

        Ids of num_pages and above are dropped.
        """
        ...


def split_slots(slot_mapping: jax.Array, num_pages: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Split slot_mapping int32 [T] into (page, offset), each int32 [T].

    A dropped slot gets a page above num_pages that no other slot has. All indices are then unique, and the scatter
    may say so; otherwise XLA on a GPU runs it serially.
    """
    page = slot_mapping // page_size
    spare = num_pages + jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    return jnp.where(page < num_pages, page, spare), slot_mapping % page_size


class InterleavedLayout:
    """The layout [P, page_size, 2 * KH, D]: K of head h is at row 2h and V at 2h + 1, so a token is contiguous.

    If V is K, the layout is [P, page_size, KH, D].
    """

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        return num_pages, page_size, num_kv_heads if latent else 2 * num_kv_heads, head_dim

    def scale_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        return InterleavedLayout.cache_shape(self, num_pages, page_size, num_kv_heads, 1, latent=latent)

    def held_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """Return the dtype of the stored array, see `Backend.held_dtype`."""
        return dtype

    def write(self, cache: Pages, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pages:
        """Write k and v [T, KH, D] at slot_mapping int32 [T], see `Backend.write`."""
        tokens, kv_heads, head_dim = k.shape
        page, offset = split_slots(slot_mapping, cache.shape[0], cache.shape[1])
        once = cache.shape[2] == kv_heads
        rows = k if once else jnp.stack([k, v], axis=2).reshape(tokens, 2 * kv_heads, head_dim)

        def put(pages: jax.Array, new: jax.Array) -> jax.Array:
            """Write the rows new [T, 2 * KH, D or 1] into pages [P, page_size, 2 * KH, D or 1]."""
            return pages.at[page, offset].set(new, mode="drop", unique_indices=True)

        return jax.tree.map(put, cache, stored(rows, cache.dtype))

    def export_pages(self, cache: Pages, page_ids: jax.Array, num_kv_heads: int) -> Pages:
        """Return pages page_ids int32 [n] -> [n, page_size, 2 * KH, D], see `Backend.export_pages`."""
        assert cache.shape[2] in (num_kv_heads, 2 * num_kv_heads)
        return jax.tree.map(lambda leaf: leaf.at[page_ids].get(mode="clip"), cache)

    def import_pages(self, cache: Pages, page_ids: jax.Array, pages: Pages) -> Pages:
        """Write pages [n, page_size, 2 * KH, D] at page_ids int32 [n], see `Backend.import_pages`."""
        return jax.tree.map(lambda leaf, new: leaf.at[page_ids].set(new.astype(leaf.dtype), mode="drop"), cache, pages)
