"""Paged attention on a CPU: the C kernels of ops/native, one for rows of one token and one for rows of several.

Layout and writes are the XLA backend's, and so is attention for head sizes and cache dtypes that the kernels do not
support. The kernels are batch-invariant: a row's bits depend on that row only.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.ops import native
from jaxserve.ops.paged_attention.ragged import Rows
from jaxserve.ops.paged_attention.xla import TiledLayer, XlaBackend


@dataclass(frozen=True)
class NativeBackend(XlaBackend):
    """See the module docstring and `base.Backend`. Raises ConfigError if the kernel cannot be compiled."""

    name: str = "native"

    def __post_init__(self) -> None:
        native.load()

    def decode(self, layer: TiledLayer, q: jax.Array, kv_lens: jax.Array, *, alone: bool) -> jax.Array:
        """Attend rows of one token: q float32 [R, N, D], scaled; kv_lens int32 [R] -> float32 [R, N, D].

        It falls back to XLA for head sizes and cache dtypes that the kernel does not support.
        """
        if not _takes(layer):
            return super().decode(layer, q, kv_lens, alone=alone)
        return native.attend(q, kv_lens, _context(layer))

    def extend(self, layer: TiledLayer, q: jax.Array, rows: Rows) -> jax.Array:
        """Attend the rows of two or more tokens: q float32 [T, N, D], scaled -> float32 [T, N, D], else zeros.

        It falls back to XLA as `decode` does.
        """
        if not _takes(layer):
            return super().extend(layer, q, rows)
        return native.attend_prompts(q, rows, _context(layer))


def _context(layer: TiledLayer) -> native.PagedContext:
    spec, [cache, *scales] = layer.spec, jax.tree.leaves(layer.cache)
    limits = spec.sliding_window, spec.soft_cap
    return native.PagedContext(cache, layer.page_table, layer.sinks, *limits, scales[0] if scales else None, spec.chunk)


def _takes(layer: TiledLayer) -> bool:
    return layer.head_dim % native.HEAD_DIM_STEP == 0 and layer.cache.dtype != jnp.float16
