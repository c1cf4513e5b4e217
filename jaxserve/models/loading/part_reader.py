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

from jaxserve.errors import ModelLoadError
from jaxserve.models.loading.checkpoint import Checkpoint, Tensor
from jaxserve.models.loading.file_formats.gguf_blocks import BlockTensor
from jaxserve.models.loading.file_formats.safetensors_file import TensorInfo, copy_converted, empty_aligned, read_rows
from jaxserve.models.loading.quantization import (
    Block,
    check_codes,
    check_scale,
    decode_fp8,
    decode_mxfp4,
    fp8_codes,
    mxfp4_codes,
    stored_tensors,
)
from jaxserve.models.loading.quantized.stored_codes import Codes, input_order, is_stored, read_codes, read_places
from jaxserve.models.stored_form import StoredForm
from jaxserve.models.weights import Packing, ParamSpec, Part

Region = tuple[slice, ...]
_WIDE = "set model.quantization: none"
CHUNK = 4 * 2**20  # bytes per read, by each of four threads
PIECE = 2**18  # numbers of GGUF that are unpacked at a time, by each of four threads


class PartReader:
    """Reads parameters of one checkpoint. Thread-safe.

    block: rows and columns per FP8 scale (weight_block). form: of quantised weights.
    """

    def __init__(self, checkpoint: Checkpoint, block: Block | None, form: StoredForm | None = None) -> None:
        self._tensors = checkpoint.tensors
        self._block = block
        self._form = form
        self._buffers = threading.local()

    def read(self, spec: ParamSpec, index: Region) -> np.ndarray:
        """Read the rectangle `index` of a parameter, in the parameter's dtype."""
        out = empty_aligned(
            tuple(len(range(*s.indices(n))) for s, n in zip(index, spec.shape, strict=True)), np.dtype(spec.dtype)
        )
        for part, place, region in _regions(spec, index):
            self._fill(out[place], part, region)
        return out

    def read_codes(self, spec: ParamSpec, index: Region, packing: Packing) -> dict[str, np.ndarray]:
        """Read the rectangle `index` of a parameter as the checkpoint has it: values, scales, maybe zeros, as leaves.

        packing: of the leaves; what a larger group of the checkpoint shares is repeated. Permuted inputs are sorted by
        group. Raises ModelLoadError for those of experts, and where the configuration has none.
        """
        *rows, depth = (len(range(*s.indices(n))) for s, n in zip(index, spec.shape, strict=True))
        out: dict[str, np.ndarray] = {}
        sorts = self._form is not None and self._form.permuted and "expert" not in spec.axes
        for part, place, region in _regions(spec, index):
            for piece, leaves in self._pieces(part, region[:-1], packing, sorts):
                for role, array in leaves.items():
                    per = part.shape[-1] // array.shape[-1]
                    if role not in out:
                        out[role] = empty_aligned((*rows, max(1, depth // per)), array.dtype)
                    out[role][_shrunk(place, per)][piece] = array[..., _shrunk(region, per)[-1]]
        return out

    def _pieces(
        self, part: Part, rows: Region, packing: Packing, sorts: bool
    ) -> Iterator[tuple[Region, dict[str, np.ndarray]]]:
        """Yield rows of a part's view piece by piece: the place among `rows`, and the arrays of leaves by role."""
        assert self._form is not None
        if self._form.method != "gguf":
            yield (), self._codes(part, rows, packing, sorts)
            return
        tensor = self._tensors[part.name]
        assert isinstance(tensor, BlockTensor)
        numbers = _view(np.arange(part.shape[0])[:, None], part)[..., 0][rows]  # of the tensor's rows
        for piece in _row_pieces(numbers.shape, max(1, PIECE // part.shape[-1])):
            some = numbers[piece]
            first = int(some.min())
            codes = Codes.of_blocks(tensor.unpacked(first, int(some.max()) + 1))
            if not np.isfinite(codes.scales).all() or not (codes.zeros is None or np.isfinite(codes.zeros).all()):
                raise ModelLoadError(f"{part.name}: not all scales are numbers", fix="download the checkpoint again")
            yield piece, {role: array[some - first] for role, array in codes.leaves(packing).items()}

    def read_order(self, spec: ParamSpec) -> np.ndarray:
        """Return the inputs of a parameter sorted by group, int32 [K].

        Raises ModelLoadError if its parts differ in it, or groups have different sizes.
        """
        assert self._form is not None
        found = [_order(part, read_places(part, self._form, self._whole), self._form) for part in spec.parts]
        for part, order in zip(spec.parts, found, strict=True):
            if not np.array_equal(order, found[0]):
                why = f"{spec.parts[0].name} and {part.name} have inputs in different orders, and are computed as one"
                raise ModelLoadError(why, fix=_WIDE)
        return found[0]

    def _codes(self, part: Part, rows: Region, packing: Packing, sorts: bool) -> dict[str, np.ndarray]:
        """Return the arrays of leaves by role, of rows of a part's view. sorts: permuted inputs by group."""
        assert self._form is not None
        if self._form.is_integer:
            codes = read_codes(part, self._form, self._whole)
            if codes.places is not None and not sorts:
                of = "experts" if self._form.permuted else "a checkpoint whose configuration does not say so"
                why = f"{part.name}: its inputs are permuted (act-order), which is not computed packed for {of}"
                raise ModelLoadError(why, fix=_WIDE)
            codes = codes.in_order()
        elif part.mxfp4:
            return mxfp4_codes(*self._mxfp4(part), part, rows)
        else:
            codes = fp8_codes(*self._fp8(part), self._block, packing.group)
        return {role: _view(array, part)[rows] for role, array in codes.leaves(packing).items()}

    def stored_bytes(self, spec: ParamSpec) -> int:
        """Return the bytes that a parameter takes in the checkpoint."""
        names = {name for part in spec.parts for name in stored_tensors(part, self._tensors, self._block, self._form)}
        return sum(self._tensors[name].num_bytes for name in names)

    def _whole(self, name: str) -> np.ndarray:
        return self._read(self._tensors[name])

    def _fill(self, target: np.ndarray, part: Part, region: Region) -> None:
        """Write the rectangle `region` of a part's view to `target`."""
        form = self._form
        if form is not None and form.method != "gguf" and is_stored(part, form, self._tensors):
            target[...] = _view(read_codes(part, form, self._whole).wide(), part)[region]
            return
        names = tuple(stored_tensors(part, self._tensors, self._block, self._form))
        stored = [self._tensors[name] for name in names]
        if part.repeat > 1:
            self._fill_repeated(target, part, region)
        elif part.mxfp4:
            target[...] = decode_mxfp4(*self._mxfp4(part), part, region)
        elif len(stored) == 2:
            target[...] = decode_fp8(*self._fp8(part), self._block, part, region)
        elif part.transpose is not None:
            copy_converted(self._read(stored[0]).transpose(part.transpose).reshape(part.view)[region], target)
        else:
            self._fill_rows(target, part, region, stored[0])

    def _mxfp4(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        """Read the blocks and the scales of a part."""
        name, scales_name = stored_tensors(part, self._tensors, self._block)
        check_scale(scales_name, scales := self._whole(scales_name))
        return self._whole(name), scales

    def _fp8(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        """Read the numbers and the scales float32 of a part."""
        name, scale_name = stored_tensors(part, self._tensors, self._block)
        check_scale(scale_name, scale := self._whole(scale_name).astype(np.float32))
        check_codes(name, weight := self._whole(name))
        return weight, scale

    def _fill_repeated(self, target: np.ndarray, part: Part, region: Region) -> None:
        """Fill a view whose first axis has copies: [h0, h0, h1, h1, ...]."""
        once = dataclasses.replace(part, repeat=1, view=(part.view[0] // part.repeat, *part.view[1:]))
        for i, copy in enumerate(range(region[0].start, region[0].stop)):
            source = copy // part.repeat
            self._fill(target[i : i + 1], once, (slice(source, source + 1), *region[1:]))

    def _fill_rows(self, target: np.ndarray, part: Part, region: Region, info: Tensor) -> None:
        """Read the part in chunks along the first axis of its view that is longer than 1.

        One index of this axis is `per` rows of the tensor.
        """
        first, last = part.rows or (0, info.shape[0])
        axis = next((i for i, size in enumerate(part.view) if size > 1), 0) if last - first > 1 else 0
        per = (last - first) // part.view[axis]
        step = max(1, CHUNK // max(1, per * math.prod(info.shape[1:]) * info.dtype.itemsize))
        begin, end = region[axis].start, region[axis].stop
        for a in range(begin, end, step):
            b = min(a + step, end)
            rows = self._read(info, first + a * per, first + b * per)
            inner = tuple(slice(None) if i == axis else s for i, s in enumerate(region))
            view = rows.reshape(*part.view[:axis], b - a, *part.view[axis + 1 :])[inner]
            copy_converted(view, target[(slice(None),) * axis + (slice(a - begin, b - begin),)])

    def _read(self, info: Tensor, first: int = 0, last: int | None = None) -> np.ndarray:
        """Read rows of a tensor, into the thread's buffer if they fit: then valid until the thread's next read."""
        if not isinstance(info, TensorInfo):
            return info.rows(first, last)
        rows = (info.shape[0] if info.shape else 1) if last is None else last - first
        size = rows * (info.num_bytes // max(1, info.shape[0] if info.shape else 1))
        if size > CHUNK or last is None:
            return read_rows(info, first, rows, np.empty(size, np.uint8))
        if not hasattr(self._buffers, "raw"):
            self._buffers.raw = np.empty(CHUNK, np.uint8)
        return read_rows(info, first, rows, self._buffers.raw[:size])


def _regions(spec: ParamSpec, index: Region) -> Iterator[tuple[Part, Region, Region]]:
    """Yield the parts that a rectangle overlaps, the place in the rectangle, and the region of the part's view."""
    bounds = [s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True)]
    for part in spec.parts:
        overlap = list(_overlaps(bounds, part))
        if all(a < b for a, b in overlap):
            place = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(overlap, bounds, strict=True))
            yield part, place, tuple(slice(a - s, b - s) for (a, b), s in zip(overlap, part.start, strict=True))


def _order(part: Part, places: np.ndarray | None, form: StoredForm) -> np.ndarray:
    """Return the inputs of a part sorted by group."""
    depth = part.shape[1]
    if places is None:
        return np.arange(depth, dtype=np.int32)
    if (np.bincount(places, minlength=form.num_groups(depth)) != form.group).any():
        raise ModelLoadError(f"{part.name}: its groups of permuted inputs differ in size", fix=_WIDE)
    return input_order(places)


def _view(array: np.ndarray, part: Part) -> np.ndarray:
    """Return a tensor's numbers, or its scales, [O, n] as the part's view, copies of heads included."""
    first, last = part.rows or (0, len(array))
    once = (part.view[0] // part.repeat, *part.view[1:-1], -1)
    return np.repeat(array[first:last].reshape(once), part.repeat, axis=0)


def _row_pieces(shape: tuple[int, ...], most: int) -> Iterator[Region]:
    """Yield slices of rows of a view that cover `shape`, each of at most `most` rows."""
    count, *rest = shape
    step = max(1, most // max(1, math.prod(rest)))
    for first in range(0, count, step):
        outer = slice(first, min(first + step, count))
        if step > 1 or not rest:
            yield (outer,)
        else:
            yield from ((outer, *inner) for inner in _row_pieces(tuple(rest), most))


def _shrunk(region: Region, per: int) -> Region:
    """Return the region of what each `per` numbers of a row share; what a whole row shares is in each."""
    *rows, last = region
    return (*rows, slice(last.start // per, -(-last.stop // per)))


def _overlaps(bounds: list[tuple[int, int]], part: Part) -> Iterator[tuple[int, int]]:
    for (a, b), start, size in zip(bounds, part.start, part.view, strict=True):
        yield max(a, start), min(b, start + size)
