"""Read a rectangle of a parameter from the checkpoint tensors that it is made of, decoded and converted.

Owns the index arithmetic between a parameter and its parts, and the read buffers. A part is read a few rows at a time
into a buffer per thread. The only fresh memory is then the weights' own, which matters because page faults on first
use cost more than all copies.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator

import numpy as np

from jaxserve.models.loading.checkpoint import Checkpoint
from jaxserve.models.loading.quantization import Block, check_scale, decode_fp8, decode_mxfp4, stored_tensors
from jaxserve.models.loading.safetensors_file import TensorInfo, copy_converted, empty_aligned, read_rows
from jaxserve.models.weights import ParamSpec, Part

Region = tuple[slice, ...]
CHUNK = 32 * 2**20  # bytes per read


class PartReader:
    """Reads parameters of one checkpoint. Thread-safe. block: rows and columns per FP8 scale (weight_block)."""

    def __init__(self, checkpoint: Checkpoint, block: Block | None) -> None:
        self._tensors = checkpoint.tensors
        self._block = block
        self._buffers = threading.local()

    def read(self, spec: ParamSpec, index: Region) -> np.ndarray:
        """Read the rectangle `index` of a parameter, in the parameter's dtype."""
        bounds = [s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True)]
        out = empty_aligned(tuple(b - a for a, b in bounds), np.dtype(spec.dtype))
        for part in spec.parts:
            overlap = list(_overlaps(bounds, part))
            if all(a < b for a, b in overlap):
                place = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(overlap, bounds, strict=True))
                region = tuple(slice(a - s, b - s) for (a, b), s in zip(overlap, part.start, strict=True))
                self._fill(out[place], part, region)
        return out

    def stored_bytes(self, spec: ParamSpec) -> int:
        """Return the bytes that a parameter takes in the checkpoint."""
        names = {name for part in spec.parts for name in stored_tensors(part, self._tensors, self._block)}
        return sum(self._tensors[name].num_bytes for name in names)

    def _fill(self, target: np.ndarray, part: Part, region: Region) -> None:
        """Write the rectangle `region` of a part's view to `target`."""
        names = tuple(stored_tensors(part, self._tensors, self._block))
        stored = [self._tensors[name] for name in names]
        if part.repeat > 1:
            self._fill_repeated(target, part, region)
        elif part.mxfp4:
            check_scale(names[1], scales := self._read(stored[1]))
            target[...] = decode_mxfp4(self._read(stored[0]), scales, part, region)
        elif len(stored) == 2:
            check_scale(names[1], scales := self._read(stored[1]).astype(np.float32))
            target[...] = decode_fp8(self._read(stored[0]), scales, self._block, part, region)
        elif part.transpose is not None:
            copy_converted(self._read(stored[0]).transpose(part.transpose).reshape(part.view)[region], target)
        else:
            self._fill_rows(target, part, region, stored[0])

    def _fill_repeated(self, target: np.ndarray, part: Part, region: Region) -> None:
        """Fill a view whose first axis has copies: [h0, h0, h1, h1, ...]."""
        once = dataclasses.replace(part, repeat=1, view=(part.view[0] // part.repeat, *part.view[1:]))
        for i, copy in enumerate(range(region[0].start, region[0].stop)):
            source = copy // part.repeat
            self._fill(target[i : i + 1], once, (slice(source, source + 1), *region[1:]))

    def _fill_rows(self, target: np.ndarray, part: Part, region: Region, info: TensorInfo) -> None:
        """Read chunk by chunk along the view's first axis longer than 1; an index of it is `per` tensor rows."""
        axis = next((i for i, size in enumerate(part.view) if size > 1), 0)
        first, last = part.rows or (0, info.shape[0])
        per = (last - first) // part.view[axis]
        step = max(1, CHUNK // max(1, per * math.prod(info.shape[1:]) * info.dtype.itemsize))
        begin, end = region[axis].start, region[axis].stop
        for a in range(begin, end, step):
            b = min(a + step, end)
            rows = self._read(info, first + a * per, first + b * per)
            inner = tuple(slice(None) if i == axis else s for i, s in enumerate(region))
            view = rows.reshape(*part.view[:axis], b - a, *part.view[axis + 1 :])[inner]
            copy_converted(view, target[(slice(None),) * axis + (slice(a - begin, b - begin),)])

    def _read(self, info: TensorInfo, first: int = 0, last: int | None = None) -> np.ndarray:
        """Read rows of a tensor, into the thread's buffer if they fit: then valid until the thread's next read."""
        rows = (info.shape[0] if info.shape else 1) if last is None else last - first
        size = rows * (info.num_bytes // max(1, info.shape[0] if info.shape else 1))
        if size > CHUNK or last is None:
            return read_rows(info, first, rows, np.empty(size, np.uint8))
        if not hasattr(self._buffers, "raw"):
            self._buffers.raw = np.empty(CHUNK, np.uint8)
        return read_rows(info, first, rows, self._buffers.raw[:size])


def _overlaps(bounds: list[tuple[int, int]], part: Part) -> Iterator[tuple[int, int]]:
    for (a, b), start, size in zip(bounds, part.start, part.view, strict=True):
        yield max(a, start), min(b, start + size)
