"""Rotary position embedding (https://arxiv.org/abs/2104.09864): the frequencies of each scaling, and the rotation.

Frequencies are host constants in float64, rounded once to float32. Angles are float32 whatever the model's dtype:
bfloat16 would round position 257 to 256, and sin(257) is far from sin(256).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of the first `rotary_dim` dimensions of a head. The other dimensions are unchanged.

    interleaved: the pairs are (0, 1), (2, 3), ...; otherwise (0, r/2), (1, r/2 + 1), ... with r = rotary_dim.
    """

    rotary_dim: int
    theta: float = 10000.0
    scaling: Scaling | None = None
    interleaved: bool = False


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Return radians per position of each rotated pair, float64 [rotary_dim / 2], and the factor on cos and sin."""
    base = rope.theta ** (-np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    match rope.scaling:
        case None:
            return base, 1.0
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


def rope_table(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute (cos, sin), each float32 [T, rotary_dim / 2], for positions int32 [T]."""
    frequencies, factor = inverse_frequencies(rope)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array], interleaved: bool = False) -> jax.Array:
    """Rotate the first rotary_dim dimensions of x [T, heads, H]. Computed in float32, returned in x's dtype."""
    cos, sin = table[0][:, None, :], table[1][:, None, :]
    half = cos.shape[-1]
    rotated = x[..., : 2 * half].astype(jnp.float32)
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    else:
        # Two products of whole rows: concatenating rotated halves instead takes XLA on a CPU four times as long.
        signed = jnp.concatenate([-sin, sin], axis=-1)
        out = rotated * jnp.concatenate([cos, cos], axis=-1) + jnp.roll(rotated, half, axis=-1) * signed
    return jnp.concatenate([out.astype(x.dtype), x[..., 2 * half :]], axis=-1)
