"""Detects the watermark of a key in a text. Needs its tokens and the key, no model and no device.

The scheme is Aaronson's (2022). For a random draw, each candidate token gets a number in (0, 1) from the key, the
four tokens before it and the token itself, and these numbers decide the draw. A single draw still follows the model's
distribution. Over many tokens the numbers of the drawn tokens are higher than chance allows. The sampler computes them
on the device (`draw_marked` in runtime/sampling/sampler.py), and this file computes them with numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.types.sampling import threefry2x32

CONTEXT = 4  # number of preceding tokens that decide a token's number, together with the key


class WatermarkScore(NamedTuple):
    """The result of a test for the watermark.

    positions: number of tested tokens. z: standard deviations above chance; a value below 4 proves nothing.
    """

    positions: int
    z: float


def watermark_score(token_ids: Sequence[int], key: int) -> WatermarkScore:
    """Test the tokens of a text, which follow at least 4 tokens of its prompt. A repeated context counts once."""
    found = {tuple(token_ids[i - CONTEXT : i + 1]) for i in range(CONTEXT, len(token_ids))}
    if not found:
        return WatermarkScore(0, 0.0)
    numbers = token_numbers(np.array(sorted(found), np.uint32), key)
    count = len(numbers)
    return WatermarkScore(count, (float(-np.log1p(-numbers).sum()) - count) / math.sqrt(count))


def token_numbers(windows: np.ndarray, key: int) -> np.ndarray:
    """Return the numbers, float64 [N] in (0, 1), of uint32 windows [N, 5] of four tokens and the one after them."""
    columns = [windows[:, i] for i in range(CONTEXT + 1)]
    key0, key1 = (np.full(len(windows), part, np.uint32) for part in (key & 0xFFFFFFFF, key >> 32))
    key0, key1 = threefry2x32(key0, key1, columns[0], columns[1])
    key0, key1 = threefry2x32(key0, key1, columns[2], columns[3])
    bits, _ = threefry2x32(key0, key1, columns[4], np.zeros_like(columns[4]))
    return ((bits >> np.uint32(9)) + 0.5) * 2.0**-23
