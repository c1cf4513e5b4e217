"""Pools hidden states to one embedding per text. `checkpoint.sentence_files` reads how from a model's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Kind = Literal["mean", "cls", "last", "max", "mean_sqrt_len"]


@dataclass(frozen=True)
class PoolingConfig:
    """The computation of a text's embedding from its hidden states.

    normalize: scale it to length 1. max_tokens: longest text that the model accepts; None: no limit of its own.
    """

    kind: Kind
    normalize: bool = True
    max_tokens: int | None = None


def pool(hidden: jax.Array, lengths: jax.Array, config: PoolingConfig) -> jax.Array:
    """Pool hidden [R, L, D], of which the first lengths[r] tokens count -> float32 [R, D].

    lengths: int32 [R]. An empty row gives zeros.
    """
    x = hidden.astype(jnp.float32)
    seen = (jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None])[:, :, None]
    size = jnp.maximum(lengths, 1).astype(jnp.float32)[:, None]
    match config.kind:
        case "last":
            out = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        case "cls":
            out = x[:, 0]
        case "max":
            out = jnp.where(seen, x, -jnp.inf).max(axis=1)
        case "mean":
            out = jnp.where(seen, x, 0.0).sum(axis=1) / size
        case "mean_sqrt_len":
            out = jnp.where(seen, x, 0.0).sum(axis=1) / jnp.sqrt(size)
    out = jnp.where((lengths > 0)[:, None], out, 0.0)
    return normalized(out) if config.normalize else out


def normalized(x: jax.Array) -> jax.Array:
    """Scale each row of x [R, D] to length 1. A row of zeros is returned unchanged."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
