"""Decoding of published low-precision weights while they are read: FP8 with block, channel or tensor scales, MXFP4.

Owns the formats and the names of their scales. Only the rectangle that a device needs is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.models.loading.safetensors_file import TensorInfo
from jaxserve.models.weights import Part

Block = tuple[int, int]

FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
MXFP4_GROUP = 32  # numbers that share a scale, two to a byte
# E2M1, the low nibble first: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BYTE = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)  # [256, 2]


def stored_tensors(
    part: Part, tensors: Mapping[str, TensorInfo], block: Block | None
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return {name: allowed shapes} of the checkpoint tensors that a part is stored in."""
    if part.mxfp4:
        *lead, last = part.shape
        groups = (*lead, last // MXFP4_GROUP)
        return {f"{part.name}_blocks": ((*groups, MXFP4_GROUP // 2),), f"{part.name}_scales": (groups,)}
    found = {part.name: (part.shape,)}
    if part.name in tensors and tensors[part.name].dtype in FP8:
        found |= _scale_tensor(part, block)
    return found


def _scale_tensor(part: Part, block: Block | None) -> dict[str, tuple[tuple[int, ...], ...]]:
    rows = part.shape[0]
    if block is None:
        return {f"{part.name}_scale": ((), (1,), (rows,), (rows, 1))}
    return {f"{part.name}_scale_inv": (tuple(-(-n // b) for n, b in zip(part.shape, block, strict=True)),)}


def decode_fp8(
    weight: np.ndarray, scale: np.ndarray, block: Block | None, part: Part, region: tuple[slice, ...]
) -> np.ndarray:
    """Decode the rectangle `region` of a part's view to float32: weight [O, I] times its scale.

    scale: [O / block rows, I / block columns], or per channel [O] or [O, 1], or one for the tensor.
    """
    assert part.transpose is None
    first, last = part.rows or (0, weight.shape[0])
    rows = np.arange(first, last).reshape(part.view[:-1])[region[:-1]]
    values = weight[first:last].reshape(part.view)[region].astype(np.float32)
    if block is None:
        return values * np.broadcast_to(scale.reshape(-1), weight.shape[:1])[rows][..., None]
    columns = np.arange(weight.shape[1])[region[-1]]
    return values * scale[rows // block[0]][..., columns // block[1]]


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray, part: Part, region: tuple[slice, ...]) -> np.ndarray:
    """Decode the rectangle `region` of a part's view to float32: E2M1 numbers times 2^(scale - 127).

    blocks: uint8 [..., I / 32, 16], two numbers per byte. scales: uint8 [..., I / 32].
    """
    groups = (*part.view[:-1], part.shape[-1] // MXFP4_GROUP)
    chosen = blocks.reshape(*groups, MXFP4_GROUP // 2)[region[:-1]]
    powers = np.ldexp(np.float32(1), scales.reshape(groups)[region[:-1]].astype(np.int32) - 127)
    values = _BYTE[chosen].reshape(*powers.shape, MXFP4_GROUP) * powers[..., None]
    return values.reshape(*powers.shape[:-1], -1)[..., region[-1]]


def check_scale(name: str, scale: np.ndarray) -> None:
    """Raise ModelLoadError unless every scale [...] is positive and finite. In uint8 scales 255 is NaN."""
    if scale.dtype == np.uint8:
        bad = int((scale == 255).sum())
    else:
        values = scale.astype(np.float32)
        bad = int((~np.isfinite(values) | (values <= 0)).sum())
    if bad:
        raise ModelLoadError(
            f"{name}: {bad} of {math.prod(scale.shape)} scales are no positive numbers",
            fix="download the checkpoint again",
        )
