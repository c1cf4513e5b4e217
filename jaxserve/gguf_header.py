"""Read the header of a GGUF file, which is untrusted: its metadata, and how many tensors are named behind it.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: "GGUF", the version, how many tensors
and values there are; the values by key; name, sizes, type and offset of each tensor; the tensors, each aligned.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve.errors import ModelLoadError

_NUMBERS = MappingProxyType({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"})
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_SMALLEST = 24  # bytes of a file without tensors and values
_LARGEST_HEADER = 100_000_000  # bytes; a vocabulary of 260,000 tokens with its merges has 10 million
_LONGEST_TEXT = 2**20  # bytes; published templates have at most 20 kB
_MAX_VALUES, _MAX_TENSORS = 2**16, 2**14  # the largest published models have 1,200 tensors
_MAX_ITEMS = 2**21  # of all arrays; 260,000 tokens, their scores and types and as many pairs that merge are 1.1 million


class Omitted(str):
    """Stands for a value that is not kept, and says how large it is."""

    __slots__ = ()


class Header:
    """Reads a header in order. Raises ValueError or struct.error for what is damaged or lies beyond its end."""

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self._data = data
        self._end = end
        self._items = 0  # of the arrays that are texts or kept
        self.position = 4

    def counts(self) -> tuple[int, int]:
        """Read the version, and return how many tensors and values there are. Raises ValueError if too many."""
        version, num_tensors, num_values = self.number("I"), self.number("Q"), self.number("Q")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of GGUF is not supported (supported: 2 and 3, little-endian)")
        if num_tensors > _MAX_TENSORS or num_values > _MAX_VALUES:
            raise ValueError(f"it says that it has {num_tensors} tensors and {num_values} values")
        return num_tensors, num_values

    def values(self, count: int, arrays: Container[str] = ()) -> dict[str, Any]:
        """Read `count` values by their keys.

        arrays: keys whose arrays are returned as lists. Other arrays, and texts of more than a megabyte, become
        Omitted. Raises ValueError for a key that is there twice.
        """
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self.text()
            if key in values:
                raise ValueError(f"it has the value {key[:100]} twice")
            values[key] = self._value(key in arrays)
        return values

    def number(self, form: str) -> Any:
        """Read a number of a form of `struct`."""
        return self.numbers(form, 1)[0]

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        begin = self._skip(count * struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{count}{form}", self._data, begin)

    def text(self) -> str:
        begin = self._skip(size := self.number("Q"))
        if size > _LONGEST_TEXT:
            return Omitted(f"a text of {size} bytes")
        return self._data[begin : self.position].decode()

    def _value(self, keep: bool) -> Any:
        """Read a value after its type. Raises ValueError if arrays have too many texts, or too many items to keep."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self.text() if kind == _STRING else self.number(_number_form(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING or keep:
            self._items += count
            if self._items > _MAX_ITEMS:
                raise ValueError(f"its arrays have more than {_MAX_ITEMS} texts or numbers")
        if kind == _STRING:
            if keep:
                return [self.text() for _ in range(count)]
            for _ in range(count):
                self._skip(self.number("Q"))
        elif keep:
            return list(self.numbers(_number_form(kind), count))
        else:
            self._skip(count * struct.calcsize(f"<{_number_form(kind)}"))
        return Omitted(f"an array of {count}")

    def _skip(self, count: int) -> int:
        """Skip bytes and return where they begin."""
        begin, self.position = self.position, self.position + count
        if self.position > self._end:
            raise ValueError("its header is cut off, or names more than it has")
        return begin


@contextmanager
def open_header(path: Path) -> Iterator[Header]:
    """Open a GGUF file for the body to read its header.

    Raises ModelLoadError if it is no GGUF file. Errors of the body that damaged bytes cause become ModelLoadError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size < _SMALLEST or file.read(4) != b"GGUF":
            raise ModelLoadError(f"{path} is no GGUF file", fix="download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                yield Header(data, min(size, _LARGEST_HEADER))
            except (ValueError, OverflowError, struct.error) as error:
                raise ModelLoadError(f"{path}: {str(error)[:300]}", fix="download the file again") from error
            except ModelLoadError as error:
                raise ModelLoadError(f"{path}: {error}", fix=error.fix) from error


def _number_form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _NUMBERS[kind]
