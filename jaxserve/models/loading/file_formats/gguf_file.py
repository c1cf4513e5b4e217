"""Read the header of one GGUF file: its metadata and its table of tensors, both checked. Reads no tensor.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: "GGUF", the version, how many tensors
and values there are; the values by key; name, sizes, type and offset of each tensor; the tensors, each aligned.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.models.loading.file_formats.gguf_blocks import BlockTensor, block_type
from jaxserve.models.loading.file_formats.safetensors_file import TensorInfo

_NUMBERS = MappingProxyType({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"})
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_SMALLEST = 24  # bytes of a file without tensors and values
_LARGEST_HEADER = 100_000_000  # bytes; a vocabulary of 260,000 tokens with its merges has 10 million
_LONGEST_TEXT = 2**20  # bytes; published templates have at most 20 kB
_MAX_VALUES, _MAX_TENSORS = 2**16, 2**14  # the largest published models have 1,200 tensors
_MAX_TEXTS = 2**21  # of all arrays; 260,000 tokens and their merges are 700,000
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**16


@dataclass(frozen=True)
class GgufFile:
    """values: metadata by key. An array, or a text of more than a megabyte, is a text that says how long it is.

    tensors: by their names in the file.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, BlockTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header. Raises ModelLoadError if it is damaged, names bytes beyond the file's, or an unknown type."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size < _SMALLEST or file.read(4) != b"GGUF":
            raise ModelLoadError(f"{path} is no GGUF file", fix="download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, _Header(data, min(size, _LARGEST_HEADER)), size)
            except (ValueError, OverflowError, struct.error) as error:
                raise ModelLoadError(f"{path}: {str(error)[:300]}", fix="download the file again") from error
            except ModelLoadError as error:
                raise ModelLoadError(f"{path}: {error}", fix=error.fix) from error


class _Header:
    """Reads a header in order. Raises ValueError or struct.error for what lies beyond its end."""

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self._data = data
        self._end = end
        self._texts = 0  # of the arrays
        self.position = 4

    def number(self, form: str) -> Any:
        """Read a number of a form of `struct`."""
        return self.numbers(form, 1)[0]

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        begin = self._skip(count * struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{count}{form}", self._data, begin)

    def text(self) -> str:
        begin = self._skip(size := self.number("Q"))
        return self._data[begin : self.position].decode() if size <= _LONGEST_TEXT else f"a text of {size} bytes"

    def value(self) -> Any:
        """Read a value after its type. Raises ValueError if arrays have too many texts."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self.text() if kind == _STRING else self.number(_number_form(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            self._texts += count
            if self._texts > _MAX_TEXTS:
                raise ValueError(f"its arrays have more than {_MAX_TEXTS} texts")
            for _ in range(count):
                self._skip(self.number("Q"))
        else:
            self._skip(count * struct.calcsize(f"<{_number_form(kind)}"))
        return f"an array of {count}"

    def _skip(self, count: int) -> int:
        """Skip bytes and return where they begin."""
        begin, self.position = self.position, self.position + count
        if self.position > self._end:
            raise ValueError("its header is cut off, or names more than it has")
        return begin


def _number_form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _NUMBERS[kind]


def _parse(path: Path, header: _Header, size: int) -> GgufFile:
    version, num_tensors, num_values = header.number("I"), header.number("Q"), header.number("Q")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} of GGUF is not supported (supported: 2 and 3, little-endian)")
    if num_tensors > _MAX_TENSORS or num_values > _MAX_VALUES:
        raise ValueError(f"it says that it has {num_tensors} tensors and {num_values} values")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = header.text()
        if key in values:
            raise ValueError(f"it has the value {key[:100]} twice")
        values[key] = header.value()
    entries = [_Entry.read(header) for _ in range(num_tensors)]
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        raise ValueError(f"'general.alignment' is {alignment!r}")
    start = -(-header.position // alignment) * alignment
    return GgufFile(path, values, _located(path, entries, start, size))


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header names it. sizes: the last dimension first. offset: from the first tensor byte."""

    name: str
    sizes: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, header: _Header) -> _Entry:
        """Read the next one. Raises ValueError or struct.error if it is damaged."""
        name, count = header.text(), header.number("I")
        if not 0 < count <= _MAX_DIMENSIONS:
            raise ValueError(f"{name[:100]} has {count} dimensions")
        return cls(name, header.numbers("Q", count), header.number("I"), header.number("Q"))

    def tensor(self, path: Path, start: int) -> BlockTensor:
        """Return where the tensor lies. start: of the tensors' bytes.

        Raises ValueError for a type that is not known or does not fit its sizes.
        """
        block = block_type(self.kind)
        depth, rest = self.sizes[0], self.sizes[1:]
        if not all(self.sizes) or depth % block.count or (not rest and block.count > 1):
            raise ValueError(f"{self.name[:100]} of sizes {list(self.sizes)} cannot have the type {block.name}")
        if not rest:  # a vector has one number a row
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
