"""Quantising weights while they are loaded: float32 numbers to values and scales (see `ops.quantized`)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxserve.ops.quantized import BLOCK, MIDDLE

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# The factors of an octave that are tried for a scale of E4M3. They halve the squared error of a single one.
_FACTORS = 2.0 ** np.linspace(0, 1, 16, endpoint=False, dtype=np.float32)
_FOUR_BITS = np.float32(2**20 + 1)  # see T. J. Dekker, "A floating-point technique for extending the precision", 1971
TILE = 2**14  # numbers that fit the cache, with their copies
_LARGEST = {"int8": 127.0, "fp8": 448.0}


def encode(wide: np.ndarray, kind: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values and scales of float32 numbers [..., K]; kind: int8, fp8 or int4.

    The scale of a group that has NaN or infinity is not finite either, so that its products are not.
    """
    with np.errstate(invalid="ignore"):
        return _encode(wide, kind, group)


def _encode(wide: np.ndarray, kind: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    groups = wide.reshape(*wide.shape[:-1], -1, group)
    if kind == "int4":
        # The number that is farthest from 0 becomes exactly 0 - MIDDLE, as in llama.cpp's Q4_0.
        farthest = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)
        scales = _no_zeros(farthest / -MIDDLE)
        values = pack(np.clip(np.rint(groups / scales) + MIDDLE, 0, 15).astype(np.uint8).reshape(wide.shape))
    else:
        largest = _LARGEST[kind]
        scales = _no_zeros(np.abs(groups).max(axis=-1, keepdims=True) / largest)
        scales = scales if kind == "int8" else scales * _best_factors(groups, scales)
        scaled = np.clip(groups / scales, -largest, largest)  # E4M3 has no infinity: beyond 464 is NaN
        values = (scaled.astype(E4M3) if kind == "fp8" else np.rint(scaled).astype(np.int8)).reshape(wide.shape)
    return values, scales[..., 0]


def _best_factors(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the factor of each scale, from 1 to 2, whose E4M3 numbers are nearest: float32 [..., 1].

    groups: [..., group], scales: the least ones, [..., 1]. A factor of 2 rounds all numbers as 1 does, because E4M3 is
    floating point, but between them the places of the large ones change.
    """
    numbers, least = groups.reshape(-1, groups.shape[-1]), scales.reshape(-1, 1)
    best = np.ones_like(least)
    step = max(1, TILE // groups.shape[-1])
    for first in range(0, len(numbers), step):
        tile = slice(first, first + step)
        best[tile] = _best_of_tile(numbers[tile] / least[tile])
    return best.reshape(scales.shape)


def _best_of_tile(numbers: np.ndarray) -> np.ndarray:
    """Return the factors of groups of numbers up to 448, [groups, group] -> [groups, 1]."""
    best, least = np.ones((len(numbers), 1), np.float32), np.full(len(numbers), np.inf, np.float32)
    scaled, high = np.empty_like(numbers), np.empty_like(numbers)
    for factor in _FACTORS:
        np.divide(numbers, factor, out=scaled)
        np.multiply(scaled, _FOUR_BITS, out=high)
        off = high - scaled
        np.subtract(high, off, out=high)  # scaled, rounded to the four bits of E4M3's normal numbers
        np.subtract(high, scaled, out=off)
        squares = np.einsum("gk,gk->g", off, off) * factor**2
        better = squares < least
        least[better], best[better] = squares[better], factor
    return best


def _no_zeros(scales: np.ndarray) -> np.ndarray:
    return np.where(scales == 0, 1, scales).astype(np.float32)


def pack(values: np.ndarray) -> np.ndarray:
    """Pack 4-bit values uint8 [..., K] in blocks of 32 -> uint8 [..., K / 2], see `Quantized.values`."""
    blocks = values.reshape(*values.shape[:-1], -1, 2, BLOCK // 2)
    return (blocks[..., 0, :] | blocks[..., 1, :] << 4).reshape(*values.shape[:-1], -1)
