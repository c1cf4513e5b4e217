"""Read GGUF files: the header with its metadata and its table of tensors, and rows of a tensor.

The header is checked before a tensor is read. Rows are dequantized, or remain quantized values with their scales.

A weight of a quantized type is value * scale - minimum in float32. A block of a K-quant (Q4_K, Q5_K, Q6_K) has 256
weights in groups of 32 or 16, whose scales and minima are integers times a scale of the block. A block of another type
is one group. The layouts follow ggml's ggml-quants.h.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import Header, gguf_parts, open_header
from jaxserve.models.checkpoint.safetensors_file import TensorInfo, read_rows
from jaxserve.ops.quantized import BLOCK, MIDDLE
from jaxserve.system import install_command

_K_BLOCK = 256  # weights of a block of K-quants
_Fields = tuple[np.ndarray, ...]


class Unpacked(NamedTuple):
    """values [N, K]: int8, or uint8 if they have 4 bits. scales, minima: float32 [N, K / group].

    If minima is None, the minimum is 8 times the scale for 4-bit values and 0 for others.
    """

    values: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None

    def numbers(self) -> np.ndarray:
        """Return the dequantized weights, float32 [N, K]."""
        groups = self.values.reshape(*self.scales.shape, -1).astype(np.float32)
        if self.minima is None and self.values.dtype == np.uint8:
            groups -= MIDDLE
        groups *= self.scales[..., None]
        if self.minima is not None:
            groups -= self.minima[..., None]
        return groups.reshape(self.values.shape)


@dataclass(frozen=True)
class Layout:
    """The layout of a type's blocks in a file.

    count: weights of a block. sizes: bytes of its fields. unpack: turns the fields, uint8 [N, B, size], into `Unpacked`
    """

    count: int
    sizes: tuple[int, ...]
    unpack: Callable[[_Fields], Unpacked]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def read(self, raw: np.ndarray) -> Unpacked:
        """Unpack rows of blocks, uint8 [N, bytes of a row]."""
        blocks = raw.reshape(len(raw), -1, self.num_bytes)
        ends = np.cumsum(self.sizes)
        with np.errstate(invalid="ignore"):  # the caller names a tensor whose scales are not finite
            values, scales, minima = self.unpack(tuple(np.split(blocks, ends[:-1], axis=-1)))
        rows = len(raw), -1
        return Unpacked(values.reshape(rows), scales.reshape(rows), None if minima is None else minima.reshape(rows))


def _halves(field: np.ndarray) -> np.ndarray:
    """Return the float16 values of a field as float32."""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def _nibbles(field: np.ndarray, together: int) -> np.ndarray:
    """Return the low halves of each `together` bytes before the high ones: uint8 [N, B, S] -> [N, B, 2 S]."""
    pieces = field.reshape(*field.shape[:-1], -1, 1, together)
    return np.concatenate([pieces & 15, pieces >> 4], axis=-2).reshape(*field.shape[:-1], -1)


def _bits(field: np.ndarray, width: int) -> np.ndarray:
    """Return the lowest `width` bits of all bytes, then the next ones: uint8 [N, B, S] -> [N, B, 8 S / width]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (field[..., None, :] >> shifts & (2**width - 1)).reshape(*field.shape[:-1], -1)


def _fifth_bits(field: np.ndarray) -> np.ndarray:
    """Return the bits of a field of four bytes in order, the lowest first: [N, B, 4] -> [N, B, 32]."""
    return np.unpackbits(field, axis=-1, bitorder="little")


def _signed(values: np.ndarray, middle: int) -> np.ndarray:
    return values.view(np.int8) - np.int8(middle)


def _q4_0(fields: _Fields) -> Unpacked:
    scale, codes = fields
    return Unpacked(_nibbles(codes, BLOCK // 2), _halves(scale), None)


def _q4_1(fields: _Fields) -> Unpacked:
    scale, least, codes = fields
    return Unpacked(_nibbles(codes, BLOCK // 2), _halves(scale), -_halves(least))


def _q5_0(fields: _Fields) -> Unpacked:
    scale, high, codes = fields
    return Unpacked(_signed(_nibbles(codes, BLOCK // 2) | _fifth_bits(high) << 4, 16), _halves(scale), None)


def _q5_1(fields: _Fields) -> Unpacked:
    scale, least, high, codes = fields
    values = _nibbles(codes, BLOCK // 2) | _fifth_bits(high) << 4
    return Unpacked(values.view(np.int8), _halves(scale), -_halves(least))


def _q8_0(fields: _Fields) -> Unpacked:
    scale, codes = fields
    return Unpacked(codes.view(np.int8), _halves(scale), None)


def _k_scales(scale: np.ndarray, least: np.ndarray, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and minima, float32 [N, B, 8]: 6-bit integers, packed in 12 bytes, times the block's own."""
    low, middle, high = np.split(packed, 3, axis=-1)
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return _halves(scale) * scales.astype(np.float32), _halves(least) * minima.astype(np.float32)


def _q4_k(fields: _Fields) -> Unpacked:
    *shared, codes = fields
    return Unpacked(_nibbles(codes, BLOCK), *_k_scales(*shared))


def _q5_k(fields: _Fields) -> Unpacked:
    *shared, high, codes = fields
    return Unpacked((_nibbles(codes, BLOCK) | _bits(high, 1) << 4).view(np.int8), *_k_scales(*shared))


def _q6_k(fields: _Fields) -> Unpacked:
    codes, high, scales, scale = fields
    halves = high.reshape(*high.shape[:-1], 2, -1)  # of the block, each with 32 bytes
    values = _nibbles(codes, 64) | _bits(halves, 2).reshape(*codes.shape[:-1], -1) << 4
    return Unpacked(_signed(values, 32), _halves(scale) * scales.view(np.int8).astype(np.float32), None)


LAYOUTS: MappingProxyType[str, Layout] = MappingProxyType(
    {
        "Q4_0": Layout(BLOCK, (2, 16), _q4_0),
        "Q4_1": Layout(BLOCK, (2, 2, 16), _q4_1),
        "Q5_0": Layout(BLOCK, (2, 4, 16), _q5_0),
        "Q5_1": Layout(BLOCK, (2, 2, 4, 16), _q5_1),
        "Q8_0": Layout(BLOCK, (2, 32), _q8_0),
        "Q4_K": Layout(_K_BLOCK, (2, 2, 12, 128), _q4_k),
        "Q5_K": Layout(_K_BLOCK, (2, 2, 12, 32, 128), _q5_k),
        "Q6_K": Layout(_K_BLOCK, (128, 64, 16, 2), _q6_k),
    }
)


_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class BlockType:
    """A type: `count` weights take `num_bytes` bytes. dtype: of the dequantized weights

    layout: set for types that stay quantized. decode: set for the other types; uint8 [N, B] -> float32 [N, K]
    """

    name: str
    count: int
    num_bytes: int
    dtype: np.dtype = _FLOAT32
    layout: Layout | None = None
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    def numbers(self, raw: np.ndarray) -> np.ndarray:
        """Dequantize the bytes of rows, uint8 [N, B] -> [N, K] in `dtype`."""
        if self.layout is not None:
            return self.layout.read(raw).numbers()
        return raw.view(self.dtype) if self.decode is None else self.decode(raw)


def _kept(name: str) -> BlockType:
    return BlockType(name, LAYOUTS[name].count, LAYOUTS[name].num_bytes, layout=LAYOUTS[name])


_KNOWN = MappingProxyType(
    {
        0: BlockType("F32", 1, 4),
        1: BlockType("F16", 1, 2, np.dtype(np.float16)),
        2: _kept("Q4_0"),
        3: _kept("Q4_1"),
        6: _kept("Q5_0"),
        7: _kept("Q5_1"),
        8: _kept("Q8_0"),
        12: _kept("Q4_K"),
        13: _kept("Q5_K"),
        14: _kept("Q6_K"),
        30: BlockType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    }
)


def block_type(number: int) -> BlockType:
    """Return the type that has this number in GGUF.

    Raises ValueError if it is unknown or cannot be decoded, ModelLoadError if that needs a package that is missing.
    """
    return _KNOWN[number] if number in _KNOWN else _decoded(number)


@functools.cache  # a file may have many tensors of a type
def _decoded(number: int) -> BlockType:
    """Return a type that the gguf package decodes."""
    try:
        import gguf  # noqa: PLC0415  # optional, and 0.2 s to import
    except ImportError:
        raise ModelLoadError(
            f"tensors of GGUF's type {number} are decoded by the package gguf", fix=install_command("gguf")
        ) from None
    kind = gguf.GGMLQuantizationType(number)
    count, num_bytes = gguf.GGML_QUANT_SIZES[kind]

    def decode(raw: np.ndarray) -> np.ndarray:
        """Decode the blocks uint8 [N, B] -> float32 [N, K]."""
        return gguf.quants.dequantize(raw, kind)

    try:
        decode(np.zeros((1, num_bytes), np.uint8))
    except NotImplementedError:
        raise ValueError(f"{kind.name} cannot be decoded") from None
    return BlockType(kind.name, count, num_bytes, decode=decode)


@dataclass(frozen=True, eq=False)
class BlockTensor:
    """A tensor. It is read from the file when it is needed.

    raw: its bytes, uint8 [rows, bytes of a row]. shape: of the tensor, rows first
    order: row i of the tensor is row order[i] of `raw`; None: all rows in order. columns: likewise
    change: of the dequantized numbers, float32 -> float32
    """

    raw: TensorInfo
    block: BlockType
    shape: tuple[int, ...]
    order: np.ndarray | None = None
    columns: np.ndarray | None = None
    change: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of `rows`."""
        return self.block.dtype

    @property
    def num_bytes(self) -> int:
        """Return the tensor's size in the file, in bytes."""
        return self.raw.num_bytes

    def rows(self, first: int, last: int | None) -> np.ndarray:
        """Return the dequantized rows [first, last) of the first axis; if last is None, all from `first` on."""
        if last is None:
            last = self.raw.shape[0] if self.order is None else len(self.order)
        numbers = self.block.numbers(self._raw_rows(first, last))
        if self.columns is not None:
            numbers = numbers[:, self.columns]
        if self.change is not None:
            numbers = self.change(numbers)
        return numbers.reshape(-1, *self.shape[1:])

    def unpacked(self, first: int, last: int) -> Unpacked:
        """Return the rows [first, last) of a matrix as quantized values and scales.

        Its type must have a layout, and each group of columns must be together in the file, see `keeps_groups`.
        """
        assert self.block.layout is not None
        found = self.block.layout.read(self._raw_rows(first, last))
        if self.columns is None:
            return found
        size = found.values.shape[1] // found.scales.shape[1]
        groups = self.columns[::size] // size
        minima = None if found.minima is None else found.minima[:, groups]
        return Unpacked(found.values[:, self.columns], found.scales[:, groups], minima)

    def keeps_groups(self, group: int) -> bool:
        """Return whether each `group` columns that follow each other do so in the file, from a multiple of it on."""
        if self.columns is None:
            return True
        if len(self.columns) % group:
            return False
        groups = self.columns.reshape(-1, group)
        return not (groups[:, 0] % group).any() and bool((groups - groups[:, :1] == np.arange(group)).all())

    def _raw_rows(self, first: int, last: int) -> np.ndarray:
        if self.order is None:
            return self._read(first, last)
        places = self.order[first:last]
        begin, end = int(places.min()), int(places.max()) + 1
        if end - begin <= 2 * len(places):
            return self._read(begin, end)[places - begin]
        runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        return np.concatenate([self._read(int(run[0]), int(run[-1]) + 1) for run in runs])

    def _read(self, first: int, last: int) -> np.ndarray:
        return read_rows(self.raw, first, last - first, np.empty((last - first) * self.raw.shape[1], np.uint8))


_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**16


@dataclass(frozen=True)
class GgufFile:
    """The header of a file.

    values: metadata by key. An array that is not read as a list, and a text above 1 MB, is replaced by a text that
      gives its length
    tensors: by their names in the file
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, BlockTensor]


def read_gguf(path: Path, lists: Container[str] = ()) -> GgufFile:
    """Read the header. If `path` is the first of several parts, read the headers of all parts.

    lists: keys whose arrays are returned as lists
    Raises ModelLoadError if a header is damaged, names bytes beyond the file's end or an unknown type, or if a part is
    missing or belongs to another file.
    """
    first = _read_part(path, lists)
    count = first.values.get("split.count", 1) or 1
    if count == 1:
        return first
    paths = gguf_parts(path)
    if len(paths) != count:
        raise ModelLoadError(f"{path} is one of {count} parts", fix="name them NAME-00001-of-0000N.gguf and so on")
    tensors: dict[str, BlockTensor] = {}
    for number, part in enumerate(paths):
        if not part.is_file():
            raise ModelLoadError(f"{part} is missing, which is a part of {path.name}", fix="download all its parts")
        found = _read_part(part, lists) if number else first
        says = found.values.get("split.no", 0), found.values.get("split.count")
        if says != (number, count) or not tensors.keys().isdisjoint(found.tensors):
            raise ModelLoadError(f"{part} is no part {number + 1} of {path.name}", fix="download all parts again")
        tensors |= found.tensors
    if first.values.get("split.tensors.count", len(tensors)) != len(tensors):
        raise ModelLoadError(f"the parts of {path} have {len(tensors)} tensors", fix="download all parts again")
    return GgufFile(path, first.values, tensors)


def _read_part(path: Path, lists: Container[str]) -> GgufFile:
    with open_header(path) as header:
        num_tensors, num_values = header.counts()
        values = header.values(num_values, lists)
        entries = [_Entry.read(header) for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"'general.alignment' is {alignment!r}")
        start = -(-header.position // alignment) * alignment
        return GgufFile(path, values, _located(path, entries, start, path.stat().st_size))


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header names it. sizes: the last dimension first. offset: from the first tensor byte."""

    name: str
    sizes: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, header: Header) -> _Entry:
        """Read the next one. Raises ValueError or struct.error if it is damaged."""
        name, count = header.text(), header.number("I")
        if not 0 < count <= _MAX_DIMENSIONS:
            raise ValueError(f"{name[:100]} has {count} dimensions")
        return cls(name, header.numbers("Q", count), header.number("I"), header.number("Q"))

    def tensor(self, path: Path, start: int) -> BlockTensor:
        """Return the tensor over its bytes in the file. start: offset of the first tensor byte

        Raises ValueError if the type is unknown or does not fit the sizes.
        """
        block = block_type(self.kind)
        depth, rest = self.sizes[0], self.sizes[1:]
        if not all(self.sizes) or depth % block.count or (not rest and block.count > 1):
            raise ValueError(f"{self.name[:100]} of sizes {list(self.sizes)} cannot have the type {block.name}")
        if not rest:  # a vector has one value a row
            depth, rest = 1, self.sizes
        row = depth // block.count * block.num_bytes
        raw = TensorInfo(path, np.dtype(np.uint8), (math.prod(rest), row), start + self.offset)
        return BlockTensor(raw, block, self.sizes[::-1])


def _located(path: Path, entries: list[_Entry], start: int, size: int) -> dict[str, BlockTensor]:
    """Return the tensors by name. Raises ValueError if two share a name or bytes, or one ends beyond the file."""
    found: dict[str, BlockTensor] = {}
    end = start
    for entry in sorted(entries, key=lambda entry: entry.offset):
        tensor = entry.tensor(path, start)
        if entry.name in found or tensor.raw.begin < end:
            raise ValueError(f"{entry.name[:100]} is there twice, or overlaps another tensor")
        end = tensor.raw.begin + tensor.raw.num_bytes
        if end > size:
            raise ValueError(f"{entry.name[:100]} ends at byte {end} of {size}: the file is cut off")
        found[entry.name] = tensor
    return found
