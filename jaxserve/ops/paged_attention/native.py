"""Paged attention on a CPU: rows with one token through the C kernel of ops/native, the others through XLA's products.

Pages and writes are the XLA backend's. In the kernel a row's bits depend on nothing but the row, in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.ops import native
from jaxserve.ops.paged_attention.xla import XlaBackend
from jaxserve.ops.paged_attention.xla_tiles import Layer


@dataclass(frozen=True)
class NativeBackend(XlaBackend):
    """See the file's docstring and `base.Backend`. ConfigError where the kernel cannot be compiled."""

    name: str = "native"

    def __post_init__(self) -> None:
        native.load()

    def decode(self, layer: Layer, q: jax.Array, kv_lens: jax.Array, *, alone: bool) -> jax.Array:
        if layer.head_dim % native.LANES or layer.cache.dtype not in (jnp.float32, jnp.bfloat16):
            return super().decode(layer, q, kv_lens, alone=alone)
        spec = layer.spec
        return native.attend(
            q,
            layer.cache,
            layer.page_table,
            kv_lens,
            layer.sinks,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
        )
