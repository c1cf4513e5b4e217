"""Read one array of an Orbax directory directly: zarr 2 without compression has one raw file per chunk.

Owns the file format and the index arithmetic between chunks and a device's rectangle. Orbax's own reader copies every
byte two more times, which is most of its time for weights in the page cache.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import read_object
from jaxserve.models.loading.file_formats.safetensors_file import TensorInfo, copy_converted, empty_aligned, read_rows

BUFFER = 32 * 2**20  # bytes per read, if they cannot be read into the result directly
FIX = "convert the checkpoint again with this version of jaxserve"
_PLAIN = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "dimension_separator": "."}
MAX_CHUNKS = 65536  # of an array; `convert` writes one per device
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "<f4": np.dtype("<f4"), "<f2": np.dtype("<f2")}
_DTYPES |= {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "|i1": np.dtype("i1"),
    "|u1": np.dtype("u1"),
    "<i4": np.dtype("<i4"),
}


@dataclass(frozen=True)
class ZarrArray:
    """An array of `shape`, in files of shape `chunks`. checksums: CRC-32 by file name; None: unknown."""

    directory: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype
    checksums: Mapping[str, int] | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Read the rectangle `index`, converted to `dtype`.

        Raises ModelLoadError if a file is missing, has the wrong size or fails its checksum.
        """
        bounds = [s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True)]
        out = empty_aligned(tuple(b - a for a, b in bounds), dtype)
        for cell in self._cells(bounds):
            overlap = [
                (max(a, i * size), min(b, (i + 1) * size))
                for (a, b), i, size in zip(bounds, cell, self.chunks, strict=True)
            ]
            target = out[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(overlap, bounds, strict=True))]
            inside = [(a - i * size, b - i * size) for (a, b), i, size in zip(overlap, cell, self.chunks, strict=True)]
            self._read_chunk(self._chunk(cell), inside, target)
        return out

    def _cells(self, bounds: list[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        """Return the grid indices of the chunks that overlap a rectangle."""
        ranges = [range(a // size, -(-b // size)) for (a, b), size in zip(bounds, self.chunks, strict=True)]
        return itertools.product(*ranges)

    def _chunk(self, cell: tuple[int, ...]) -> TensorInfo:
        path = self.directory / (".".join(map(str, cell)) or "0")
        expected = math.prod(self.chunks) * self.dtype.itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}", fix=FIX) from None
        if size != expected:
            raise ModelLoadError(f"{path} cannot be read: {size} bytes instead of {expected}", fix=FIX)
        return TensorInfo(path, self.dtype, self.chunks, 0)

    def _read_chunk(self, chunk: TensorInfo, inside: list[tuple[int, int]], target: np.ndarray) -> None:
        """Read the rectangle `inside` of a chunk to `target`, without a copy if the file's bytes are the target's."""
        (first, last), *rest = inside or [(0, 1)]
        row = math.prod(self.chunks[1:]) * self.dtype.itemsize
        whole_rows = all(b - a == size for (a, b), size in zip(rest, self.chunks[1:], strict=True))
        all_rows = (first, last) == (0, self.chunks[0] if self.chunks else 1)
        if whole_rows and target.dtype == self.dtype and target.flags.c_contiguous:
            raw = target.reshape(-1).view(np.uint8)
            read_rows(chunk, first, last - first, raw)
            self._check(chunk, zlib.crc32(raw.data) if all_rows else None)
            return
        step, found = max(1, BUFFER // row), 0
        for a in range(first, last, step):
            b = min(a + step, last)
            raw = np.empty((b - a) * row, np.uint8)
            rows = read_rows(chunk, a, b - a, raw)
            found = zlib.crc32(raw.data, found)
            copy_converted(rows[(slice(None), *(slice(*bounds) for bounds in rest))], target[a - first : b - first])
        self._check(chunk, found if all_rows else None)

    def _check(self, chunk: TensorInfo, found: int | None) -> None:
        """Raise ModelLoadError if the checksum is wrong. found: None if only part of the file was read; not checked."""
        if self.checksums is not None and found is not None and found != self.checksums.get(chunk.file.name):
            raise ModelLoadError(f"{chunk.file} cannot be read: its bytes are not those that were written", fix=FIX)


def open_array(directory: Path, checksums: Mapping[str, int] | None = None) -> ZarrArray:
    """Open an array. Raises ModelLoadError if it is missing or not in the format that `orbax.convert` writes."""
    path = directory / ".zarray"
    try:
        found = read_object(path)
        if any(found[key] != value for key, value in _PLAIN.items()):
            raise ValueError("the array is compressed or of another version of zarr")
        shape, chunks = _sizes(found, "shape"), _sizes(found, "chunks")
        if len(shape) != len(chunks) or any(size < 1 for size in chunks):
            raise ValueError("its chunks do not fit its shape")
        if math.prod(-(-n // size) for n, size in zip(shape, chunks, strict=True)) > MAX_CHUNKS:
            raise ValueError(f"it has more than {MAX_CHUNKS} chunks")
        return ZarrArray(directory, shape, chunks, _DTYPES[found["dtype"]], checksums)
    except (ValueError, KeyError, TypeError, ModelLoadError) as error:
        raise ModelLoadError(f"{path} cannot be read: {str(error)[:200]}", fix=FIX) from error


def _sizes(found: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = found[key]
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 2**48 for size in value):
        raise ValueError(f"{key!r} is no list of sizes")
    return tuple(value)
