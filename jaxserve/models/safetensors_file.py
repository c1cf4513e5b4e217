"""One safetensors file, memory-mapped: its table of contents, checked, and its tensors as numpy views.

Format: uint64 little-endian length of a JSON header, the header {name: {dtype, shape, data_offsets}}, the bytes.
A view reads only the pages that are touched, so a slice of a tensor costs a slice of its bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError

DTYPES = MappingProxyType(
    {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "I64": np.dtype(np.int64),
        "I32": np.dtype(np.int32),
        "I16": np.dtype(np.int16),
        "I8": np.dtype(np.int8),
        "U8": np.dtype(np.uint8),
        "BOOL": np.dtype(np.bool_),
    }
)
_LARGEST_HEADER = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `begin` is a byte offset in the file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_contents(path: Path) -> Iterator[tuple[str, TensorInfo]]:
    """(name, TensorInfo) of every tensor; a name comes twice where the file has it twice.

    Raises ModelLoadError where the file is truncated or its header does not describe its bytes exactly.
    """
    entries, data_start, size = _read_header(path)
    tensors = [(name, *_read_entry(path, name, entry)) for name, entry in entries if name != "__metadata__"]
    position = 0
    for name, info, (begin, end) in sorted(tensors, key=lambda tensor: tensor[2]):
        if begin != position or end - begin != info.num_bytes:
            raise ModelLoadError(
                f"{path}: {name} has the wrong offsets [{begin}, {end}], expected {info.num_bytes} bytes at {position}"
            )
        position = end
        yield name, TensorInfo(path, info.dtype, info.shape, data_start + begin)
    if data_start + position != size:
        problem = "is truncated" if data_start + position > size else "has bytes that its header does not name"
        raise ModelLoadError(f"{path} {problem}: {size} bytes, the header names {data_start + position}")


def _read_header(path: Path) -> tuple[list[tuple[str, Any]], int, int]:
    """(entries in order, offset of the first tensor byte, size of the file)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ModelLoadError(f"{path} is truncated or no safetensors file: header of {length} bytes in {size}")
        try:
            entries = json.loads(file.read(length), object_pairs_hook=_Pairs)
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path}: the header is no JSON: {error}") from error
    if not isinstance(entries, _Pairs):
        raise ModelLoadError(f"{path}: the header is no JSON object")
    return list(entries), 8 + length, size


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its keys in order, repeated ones too."""


def _read_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    fields = dict(entry) if isinstance(entry, _Pairs) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ModelLoadError(f"{path}: the header's entry of {name} is malformed")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ModelLoadError(f"{path}: {name} has dtype {dtype!r}; readable are {', '.join(DTYPES)}")
    return TensorInfo(path, DTYPES[dtype], shape, 0), (offsets[0], offsets[1])


def _sizes(value: Any) -> tuple[int, ...] | None:
    valid = isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
    return tuple(value) if valid else None


def open_tensor(info: TensorInfo) -> np.ndarray:
    """A read-only view of a tensor's bytes in the page cache."""
    if info.num_bytes == 0:
        return np.empty(info.shape, info.dtype)
    raw = np.memmap(info.file, np.uint8, "r", info.begin, (info.num_bytes,))
    return raw.view(np.ndarray).view(info.dtype).reshape(info.shape)
