"""Read one safetensors file: its checked table of contents, and rows of its tensors as numpy arrays.

Format: the length of the header as a little-endian uint64, the JSON header {name: {dtype, shape, data_offsets}}, the
bytes of the tensors.
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
ALIGNMENT = 64  # bytes; XLA's alignment of arrays on a CPU
_LARGEST_HEADER = 100_000_000  # bytes; limit of the format


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor. begin: byte offset in the file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_contents(path: Path, largest_header: int = _LARGEST_HEADER) -> Iterator[tuple[str, TensorInfo]]:
    """Yield (name, TensorInfo) of every tensor. If the file has a name twice, it is yielded twice.

    largest_header: in bytes
    Raises ModelLoadError if the file is truncated or its header does not describe its bytes exactly.
    """
    entries, data_start, size = _read_header(path, largest_header)
    tensors = [(name, *_read_entry(path, name, entry)) for name, entry in entries if name != "__metadata__"]
    position = 0
    for name, info, (begin, end) in sorted(tensors, key=lambda tensor: tensor[2]):
        if begin != position or end - begin != info.num_bytes:
            raise _damaged(
                f"{path}: {name} has the wrong offsets [{begin}, {end}], expected {info.num_bytes} bytes at {position}"
            )
        position = end
        yield name, TensorInfo(path, info.dtype, info.shape, data_start + begin)
    if data_start + position != size:
        problem = "is truncated" if data_start + position > size else "has bytes that its header does not name"
        raise _damaged(f"{path} {problem}: {size} bytes, the header names {data_start + position}")


def _damaged(message: str) -> ModelLoadError:
    return ModelLoadError(message, fix="download the checkpoint again")


def _read_header(path: Path, largest: int) -> tuple[list[tuple[str, Any]], int, int]:
    """Read (entries in order, offset of the first tensor byte, size of the file)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, largest):
            raise _damaged(f"{path} is truncated or no safetensors file: header of {length} bytes in {size}")
        try:
            entries = json.loads(file.read(length), object_pairs_hook=_Pairs)
        except (ValueError, RecursionError) as error:
            raise _damaged(f"{path}: the header is no JSON: {error}") from error
    if not isinstance(entries, _Pairs):
        raise _damaged(f"{path}: the header is no JSON object")
    return list(entries), 8 + length, size


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as (key, value) pairs in order, repeated keys included."""


def _read_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    fields = dict(entry) if isinstance(entry, _Pairs) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(f"{path}: the header's entry of {name} is malformed")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ModelLoadError(f"{path}: {name} has dtype {dtype!r}; readable are {', '.join(DTYPES)}")
    return TensorInfo(path, DTYPES[dtype], shape, 0), (offsets[0], offsets[1])


def _sizes(value: Any) -> tuple[int, ...] | None:
    valid = isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
    return tuple(value) if valid else None


def read_rows(info: TensorInfo, first: int, count: int, raw: np.ndarray) -> np.ndarray:
    """Read `count` rows of a tensor from row `first` on into `raw`, uint8 [their bytes]. A scalar is one row.

    Returns `raw` as an array [count, ...] of the tensor's dtype. Raises ModelLoadError if the file is too short.
    """
    shape = (count, *info.shape[1:]) if info.shape else ()
    begin = info.begin + first * (raw.size // max(count, 1))
    with info.file.open("rb", buffering=0) as file:
        file.seek(begin)
        view = memoryview(raw.data)
        while len(view):
            read = file.readinto(view)
            if not read:
                raise _damaged(f"{info.file} became shorter while it was read")
            view = view[read:]
    return raw.view(info.dtype).reshape(shape)


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return np.empty aligned to 64 bytes. The CPU client uses such a buffer as the device array without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def copy_converted(source: np.ndarray, target: np.ndarray) -> None:
    """Convert and copy source [...] to target [...], of the same shape.

    Copies as integers if the bits allow it: numpy calls a function per element for dtypes that are not built in
    (bfloat16, FP8), which is 50 times slower.
    """
    if source.dtype == target.dtype:
        bits = np.dtype(f"u{source.dtype.itemsize}")
        target.view(bits)[...] = source.view(bits)
    elif source.dtype == ml_dtypes.bfloat16 and target.dtype == np.float32:
        wide = target.view(np.uint32)
        np.left_shift(source.view(np.uint16), 16, out=wide, dtype=np.uint32)
    else:
        target[...] = source
