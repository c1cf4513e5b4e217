"""Published FP8 (block, channel or tensor scales) and MXFP4 weights: decoded while they are read, or as codes.

Owns the formats and the names of their scales. Only the rectangle that a device needs is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.models.loading.checkpoint import Tensor
from jaxserve.models.loading.quantized.encode import E4M3
from jaxserve.models.loading.quantized.stored_codes import Codes, code_tensors, is_stored
from jaxserve.models.stored_form import StoredForm
from jaxserve.models.weights import Part

Block = tuple[int, int]

FP8 = (E4M3, np.dtype(ml_dtypes.float8_e5m2))
_DAMAGED = "download the checkpoint again"
MXFP4_GROUP = 32  # numbers that share a scale, two to a byte
# E2M1, the low nibble first: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BYTE = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)  # [256, 2]


def stored_tensors(
    part: Part, tensors: Mapping[str, Tensor], block: Block | None, form: StoredForm | None = None
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return {name: allowed shapes} of the checkpoint tensors that a part is stored in."""
    if form is not None and is_stored(part, form, tensors):
        return code_tensors(part, form)
    if part.mxfp4:
        *lead, last = part.shape
        groups = (*lead, last // MXFP4_GROUP)
        return {f"{part.name}_blocks": ((*groups, MXFP4_GROUP // 2),), f"{part.name}_scales": (groups,)}
    found = {part.name: (part.shape,)}
    if part.name in tensors and tensors[part.name].dtype in FP8:
        found |= _scale_tensor(part, block, tensors)
    return found


class ModuleNames(frozenset[str]):
    """Names of modules. Programs and pages are named by texts of a config, so this one is the same in every process."""

    def __repr__(self) -> str:
        return repr(sorted(self))


def fp8_modules(tensors: Mapping[str, Tensor]) -> ModuleNames:
    """Return the names of the modules whose weights are E4M3."""
    return ModuleNames(name.removesuffix(".weight") for name, info in tensors.items() if info.dtype == E4M3)


def _scale_tensor(
    part: Part, block: Block | None, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    rows, name = part.shape[0], f"{part.name}_scale"
    if block is None:
        return {name: ((), (1,), (rows,), (rows, 1))}
    if name not in tensors:  # as compressed-tensors calls it
        name = f"{part.name}_scale_inv"
    return {name: (tuple(-(-n // b) for n, b in zip(part.shape, block, strict=True)),)}


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


def fp8_codes(weight: np.ndarray, scale: np.ndarray, block: Block | None, group: int) -> Codes:
    """Return a weight [O, I] as values and scales float32 [O, I / group], see `decode_fp8`. group: divides a block."""
    rows, depth = weight.shape
    if block is None:
        return Codes(weight, np.repeat(np.broadcast_to(scale.reshape(-1), rows)[:, None], depth // group, axis=1), None)
    columns = np.arange(0, depth, group) // block[1]
    return Codes(weight, scale[np.arange(rows) // block[0]][:, columns], None)


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray, part: Part, region: tuple[slice, ...]) -> np.ndarray:
    """Decode the rectangle `region` of a part's view to float32: E2M1 numbers times 2^(scale - 127).

    blocks: uint8 [..., I / 32, 16], two numbers per byte. scales: uint8 [..., I / 32].
    """
    groups = (*part.view[:-1], part.shape[-1] // MXFP4_GROUP)
    chosen = blocks.reshape(*groups, MXFP4_GROUP // 2)[region[:-1]]
    powers = np.ldexp(np.float32(1), scales.reshape(groups)[region[:-1]].astype(np.int32) - 127)
    values = _BYTE[chosen].reshape(*powers.shape, MXFP4_GROUP) * powers[..., None]
    return values.reshape(*powers.shape[:-1], -1)[..., region[-1]]


def mxfp4_codes(blocks: np.ndarray, scales: np.ndarray, part: Part, rows: tuple[slice, ...]) -> dict[str, np.ndarray]:
    """Return the arrays of leaves by role, of `rows` of a part's view: see `ops.quantized`.

    blocks: uint8 [..., I / 32, 16], scales: uint8 [..., I / 32] -> values uint8 [..., I / 2], scales [..., I / 32].
    """
    groups = (*part.view[:-1], part.shape[-1] // MXFP4_GROUP)
    pairs = blocks.reshape(*groups, MXFP4_GROUP // 2)[rows]
    first, second = np.split(pairs, 2, axis=-1)  # the codes 2i and 2i + 1 of each half of a group lie in one byte
    values = np.empty(pairs.shape, np.uint8)
    values[..., ::2] = (first & 15) | (second << 4)
    values[..., 1::2] = (first >> 4) | (second & 0xF0)
    return {"values": values.reshape(*values.shape[:-2], -1), "scales": scales.reshape(groups)[rows]}


def check_codes(name: str, weight: np.ndarray) -> None:
    """Raise ModelLoadError if a number of an FP8 weight E4M3 [O, I] is NaN. E5M2 is not checked."""
    if weight.dtype == E4M3 and ((weight.view(np.uint8) & 0x7F) == 0x7F).any():
        raise ModelLoadError(f"{name}: not all numbers are finite", fix=_DAMAGED)


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
            fix=_DAMAGED,
        )
