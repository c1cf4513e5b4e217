"""Paged attention on a CPU: the C kernel of ops/native for rows of one token, the XLA backend for the others.

Layout and writes are the XLA backend's. The kernel is batch-invariant: a row's bits depend on that row only.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.ops import native
from jaxserve.ops.paged_attention.xla import XlaBackend
from jaxserve.ops.paged_attention.xla_tiles import TiledLayer


@dataclass(frozen=True)
class NativeBackend(XlaBackend):
    """See the module docstring and `base.Backend`. Raises ConfigError if the kernel cannot be compiled."""

    name: str = "native"

    def __post_init__(self) -> None:
        native.load()

    def decode(self, layer: TiledLayer, q: jax.Array, kv_lens: jax.Array, *, alone: bool) -> jax.Array:
        """Attend rows of one token: q float32 [R, N, D], scaled; kv_lens int32 [R] -> float32 [R, N, D].

        Falls back to XLA for head sizes and cache dtypes that the kernel does not take.
        """
        if layer.head_dim % native.HEAD_DIM_STEP or layer.cache.dtype == jnp.float16:
            return super().decode(layer, q, kv_lens, alone=alone)
        spec, [cache, *scales] = layer.spec, jax.tree.leaves(layer.cache)
        return native.attend(
            q,
            cache,
            layer.page_table,
            kv_lens,
            layer.sinks,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            scales=scales[0] if scales else None,
        )
