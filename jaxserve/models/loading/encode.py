"""Quantising weights while they are loaded: float32 numbers to values and scales (see `ops.quantized`)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxserve.ops.quantized import BLOCK, MIDDLE

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
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
        scaled = np.clip(groups / scales, -largest, largest)  # E4M3 has no infinity: beyond 464 is NaN
        values = (scaled.astype(_E4M3) if kind == "fp8" else np.rint(scaled).astype(np.int8)).reshape(wide.shape)
    return values, scales[..., 0]


def _no_zeros(scales: np.ndarray) -> np.ndarray:
    return np.where(scales == 0, 1, scales).astype(np.float32)


def pack(values: np.ndarray) -> np.ndarray:
    """Pack 4-bit values uint8 [..., K] in blocks of 32 -> uint8 [..., K / 2], see `Quantized.values`."""
    blocks = values.reshape(*values.shape[:-1], -1, 2, BLOCK // 2)
    return (blocks[..., 0, :] | blocks[..., 1, :] << 4).reshape(*values.shape[:-1], -1)
