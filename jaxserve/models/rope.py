"""Rotary position embedding (https://arxiv.org/abs/2104.09864): the frequencies of each scaling, and the rotation.

Frequencies are host constants in float64, rounded once to float32. Angles are float32 whatever the model's dtype:
bfloat16 would round position 257 to 256, and sin(257) is far from sin(256).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: positions are divided by `factor` (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, with a linear ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over dimensions. cos and sin are scaled by `attention_factor`."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753): a divisor per frequency, for short and for long contexts.

    The server's maximum context length decides which set is used (`long`), never the length of a request: the keys
    in the cache were rotated once and must stay comparable.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    long: bool


@dataclass(frozen=True)
class ProportionalScaling:
    """Gemma 4: the first `share` of a head's pairs rotate, the others stay; see `RopeConfig`.

    Unlike a smaller rotary_dim it keeps the distance between the two halves of a pair, and the frequencies.
    """

    share: float
    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True)
class QueryScale:
    """A query at position p is multiplied by 1 + beta * log(1 + floor((p + shift) / period)).

    As in Ministral 3, without shift, and in Llama 4.
    """

    beta: float
    period: int
    shift: int = 0


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of the first `rotary_dim` dimensions of a head. The other dimensions are unchanged.

    Without any, rotary_dim 0, it may still scale queries.
    interleaved: the pairs are (0, 1), (2, 3), ...; otherwise (0, r/2), (1, r/2 + 1), ... with r = rotary_dim.
    axes: the position that each pair turns by, 0 frame, 1 row, 2 column of a picture; (): all turn by the same
    """

    rotary_dim: int
    theta: float = 10000.0
    scaling: Scaling | None = None
    interleaved: bool = False
    query_scale: QueryScale | None = None
    axes: tuple[int, ...] = ()


class RopeTable(NamedTuple):
    """A rotation at the positions of a step: cos and sin float32 [T, rotary_dim / 2], query_scale float32 [T]."""

    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None = None


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Return radians per position of each rotated pair, float64 [rotary_dim / 2], and the factor on cos and sin."""
    base = rope.theta ** (-np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    match rope.scaling:
        case None:
            return base, 1.0
        case ProportionalScaling(share, factor):
            return np.where(np.arange(len(base)) < share * rope.rotary_dim // 2, base / factor, 0.0), 1.0
        case LinearScaling(factor):
            return base / factor, 1.0
        case Llama3Scaling():
            return _llama3(base, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(base, rope, rope.scaling), rope.scaling.attention_factor
        case LongRopeScaling():
            chosen = rope.scaling.long_factor if rope.scaling.long else rope.scaling.short_factor
            return base / np.asarray(chosen, np.float64), rope.scaling.attention_factor


def _llama3(base: np.ndarray, s: Llama3Scaling) -> np.ndarray:
    turns = s.original_max_position * base / (2 * math.pi)  # full turns within the original context
    keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * base + (1 - keep) * base / s.factor


def _yarn(base: np.ndarray, rope: RopeConfig, s: YarnScaling) -> np.ndarray:
    def dimension(turns: float) -> float:
        wavelength = s.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (np.arange(len(base)) - low) / max(high - low, 0.001)
    interpolate = np.clip(ramp, 0.0, 1.0)
    return interpolate * base / s.factor + (1 - interpolate) * base


def rope_table(rope: RopeConfig, positions: jax.Array) -> RopeTable:
    """Compute the rotation at positions int32 [T], or [3, T]: by frame, row and column (M-RoPE, arXiv:2409.12191)."""
    frequencies, factor = inverse_frequencies(rope)
    if positions.ndim == 2:
        chosen = positions[np.asarray(rope.axes)].T.astype(jnp.float32)
        angles = chosen * jnp.asarray(frequencies, jnp.float32)[None, :]
    else:
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    scale = None
    if rope.query_scale is not None:
        by = rope.query_scale
        moved = positions + by.shift if by.shift else positions
        scale = 1 + by.beta * jnp.log1p((moved // by.period).astype(jnp.float32))
    return RopeTable(jnp.cos(angles) * factor, jnp.sin(angles) * factor, scale)


def scale_queries(q: jax.Array, table: RopeTable) -> jax.Array:
    """Multiply q [T, heads, H] by the scale of its positions, if the rotation has one."""
    if table.query_scale is None:
        return q
    return (q.astype(jnp.float32) * table.query_scale[:, None, None]).astype(q.dtype)


def apply_rope(x: jax.Array, table: RopeTable, interleaved: bool = False) -> jax.Array:
    """Rotate the first rotary_dim dimensions of x [T, heads, H]. Computed in float32, returned in x's dtype."""
    cos, sin = table.cos[:, None, :], table.sin[:, None, :]
    half = cos.shape[-1]
    if not half:
        return x
    rotated = x[..., : 2 * half].astype(jnp.float32)
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    else:
        # Two products of whole rows: concatenating rotated halves instead takes XLA on a CPU four times as long.
        signed = jnp.concatenate([-sin, sin], axis=-1)
        out = rotated * jnp.concatenate([cos, cos], axis=-1) + jnp.roll(rotated, half, axis=-1) * signed
    return jnp.concatenate([out.astype(x.dtype), x[..., 2 * half :]], axis=-1)
