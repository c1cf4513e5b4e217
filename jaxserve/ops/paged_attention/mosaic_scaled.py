"""What the Mosaic kernel of attention does for pages of 8 bits: shared memory, conversion and scales of a tile.

A tile's values are converted on their way from the stages to one tile in q's dtype, from which wgmma multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

CONCATENATES = jax.__version_info__ >= (0, 11)  # whether Mosaic joins arrays in registers
COPY_ALIGN = 128  # bytes: where the tensor memory accelerator may write in shared memory


def scales_in_flight(stages: int, pages: int, kept: int, page_size: int) -> Any:
    """Return the shared memory of scales, float32 [stages, pages of a tile, rows, page_size].

    A page has at least the rows that make COPY_ALIGN bytes. Those after the `kept` ones of K and V are not used.
    """
    rows = max(kept, COPY_ALIGN // (4 * page_size))
    return plgpu.SMEM((stages, pages, rows, page_size), jnp.float32)


def widen(tile, wide) -> None:
    """Convert the values of a tile, int8 or E4M3 [tile, D] in shared memory, to those of `wide`. Exact."""
    values = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_2X)  # pyright: ignore[reportCallIssue]
    if values.dtype != jnp.int8:  # E4M3 becomes bfloat16 by way of float32
        values = values.astype(jnp.float32)
    wide[...] = values.astype(wide.dtype)
    plgpu.commit_smem()


def column_scales(pages, row: int, first: jax.Array, is_live: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the scales float32 [tile] of K (row 0) or V, one for each column of wgmma's result.

    pages: a stage of `scales_in_flight`. first: the place of the tile's first token in the context, int32 [].
    A token that is not live has 0: its page may hold another request's NaN.
    """
    num_pages, _, page_size = pages.shape
    by_column = plgpu.Layout.WGMMA.reduce(0)
    parts = [plgpu.load(pages.at[page, row], layout=by_column) for page in range(num_pages)]  # pyright: ignore[reportCallIssue]
    place = first + plgpu.broadcasted_iota(jnp.int32, (num_pages * page_size,), 0, layout=by_column)
    return jnp.where(is_live(place), jnp.concatenate(parts), 0.0)
