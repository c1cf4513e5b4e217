"""Whether a text carries the watermark of a key: needs its tokens and the key, no model and no device.

The watermark is that of Aaronson (2022): where the sampler would draw at random, each candidate token gets a number in
(0, 1) from the key, the four tokens before it and itself, and the draw is decided by those numbers. A single draw
follows the model's distribution as before; over many tokens the numbers of those that were chosen are too high for
chance. What the sampler computes on the device (runtime/sampling/sampler.py) is computed here once more, with numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONTEXT = 4  # tokens before a token that decide, with the key, its number
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class WatermarkScore(NamedTuple):
    """positions: tokens that were tested; z: standard deviations above chance, under 4 says nothing."""

    positions: int
    z: float


def watermark_score(token_ids: Sequence[int], key: int) -> WatermarkScore:
    """Test the tokens of a text, 4 of its prompt or more before them. A context that comes again counts once."""
    found = {tuple(token_ids[i - CONTEXT : i + 1]) for i in range(CONTEXT, len(token_ids))}
    if not found:
        return WatermarkScore(0, 0.0)
    numbers = token_numbers(np.array(sorted(found), np.uint32), key)
    count = len(numbers)
    return WatermarkScore(count, (float(-np.log1p(-numbers).sum()) - count) / math.sqrt(count))


def token_numbers(windows: np.ndarray, key: int) -> np.ndarray:
    """uint32 [N, 5] of four tokens and the one after them -> float64 [N] in (0, 1)."""
    columns = [windows[:, i] for i in range(CONTEXT + 1)]
    key0, key1 = (np.full(len(windows), part, np.uint32) for part in (key & 0xFFFFFFFF, key >> 32))
    key0, key1 = _threefry(key0, key1, columns[0], columns[1])
    key0, key1 = _threefry(key0, key1, columns[2], columns[3])
    bits, _ = _threefry(key0, key1, columns[4], np.zeros_like(columns[4]))
    return ((bits >> np.uint32(9)) + 0.5) * 2.0**-23


def _threefry(key0: np.ndarray, key1: np.ndarray, x0: np.ndarray, x1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32, 20 rounds (Salmon et al., 2011), uint32 [N]."""
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
