"""The layout of pages whose scales are contiguous: those of a page's tokens, for one head.

Values have the interleaved layout. Scales are [P, 1, 2 * KH, page_size], or [P, 1, KH, page_size] if V is K, so that a
kernel can copy a page's scales of a head as one block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.ops.paged_attention.base import InterleavedLayout, split_slots
from jaxserve.ops.paged_attention.scaled_pages import Pages, ScaledPages


class PageScalesLayout(InterleavedLayout):
    """See the module docstring. Wide pages are `InterleavedLayout`'s."""

    def scale_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        return num_pages, 1, num_kv_heads if latent else 2 * num_kv_heads, page_size

    def write(self, cache: Pages, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pages:
        """See `Backend.write`: k and v [T, KH, D], slot_mapping int32 [T]."""
        if not isinstance(cache, ScaledPages):
            return super().write(cache, k, v, slot_mapping)
        tokens, kv_heads, head_dim = k.shape
        once = cache.shape[2] == kv_heads
        rows = k if once else jnp.stack([k, v], axis=2).reshape(tokens, 2 * kv_heads, head_dim)
        new = ScaledPages.of(rows, cache.dtype)
        page, offset = split_slots(slot_mapping, cache.shape[0], cache.shape[1])
        values = cache.values.at[page, offset].set(new.values, mode="drop", unique_indices=True)
        scales = cache.scales.at[page, 0, :, offset].set(new.scales[..., 0], mode="drop", unique_indices=True)
        return ScaledPages(values, scales)

    def export_pages(self, cache: Pages, page_ids: jax.Array, num_kv_heads: int) -> Pages:
        """See `Backend.export_pages`: page_ids int32 [n] -> [n, page_size, 2 * KH, D]."""
        return _turned(super().export_pages(cache, page_ids, num_kv_heads))

    def import_pages(self, cache: Pages, page_ids: jax.Array, pages: Pages) -> Pages:
        """See `Backend.import_pages`: page_ids int32 [n], pages [n, page_size, 2 * KH, D]."""
        return super().import_pages(cache, page_ids, _turned(pages))


def _turned(pages: Pages) -> Pages:
    """Exchange the axes 1 and 3 of scales: [n, 1, 2 * KH, page_size] and [n, page_size, 2 * KH, 1]."""
    return ScaledPages(pages.values, pages.scales.swapaxes(1, 3)) if isinstance(pages, ScaledPages) else pages
