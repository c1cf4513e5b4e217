"""One array of an Orbax directory, read directly: zarr 2 without compression is a raw file a chunk.

Owns the files' form and the arithmetic between chunks and a device's rectangle. Orbax's own reader copies every byte
twice more, which is most of its time for weights in the page cache.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.models.safetensors_file import TensorInfo, copy_converted, empty_aligned, read_rows

BUFFER = 32 * 2**20  # bytes read at a time where they cannot be read in place
FIX = "convert the checkpoint again with this version of jaxserve"
_PLAIN = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "dimension_separator": "."}
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "<f4": np.dtype("<f4"), "<f2": np.dtype("<f2")}


@dataclass(frozen=True)
class ZarrArray:
    """An array of `shape` in files of `chunks` each."""

    directory: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """The rectangle `index`, converted to `dtype`. Raises ModelLoadError where a file is missing or too short."""
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
        """Grid places of the chunks that a rectangle touches."""
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
        """target = the rectangle `inside` of a chunk; in place where the file's bytes are the target's."""
        (first, last), *rest = inside or [(0, 1)]
        row = math.prod(self.chunks[1:]) * self.dtype.itemsize
        whole_rows = all(b - a == size for (a, b), size in zip(rest, self.chunks[1:], strict=True))
        if whole_rows and target.dtype == self.dtype and target.flags.c_contiguous:
            read_rows(chunk, first, last - first, target.reshape(-1).view(np.uint8))
            return
        step = max(1, BUFFER // row)
        for a in range(first, last, step):
            b = min(a + step, last)
            rows = read_rows(chunk, a, b - a, np.empty((b - a) * row, np.uint8))
            copy_converted(rows[(slice(None), *(slice(*bounds) for bounds in rest))], target[a - first : b - first])


def open_array(directory: Path) -> ZarrArray:
    """Raises ModelLoadError where the array is absent or of another form than `orbax.convert` writes."""
    path = directory / ".zarray"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if any(found[key] != value for key, value in _PLAIN.items()):
            raise ValueError("the array is compressed or of another version of zarr")
        return ZarrArray(directory, tuple(found["shape"]), tuple(found["chunks"]), _DTYPES[found["dtype"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}", fix=FIX) from error
