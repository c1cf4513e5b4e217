"""Read the table of tensors of a GGUF file beside its metadata, both checked. Reads no tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import Header, Omitted, gguf_parts, open_header
from jaxserve.models.loading.file_formats.gguf_blocks import BlockTensor, block_type
from jaxserve.models.loading.file_formats.safetensors_file import TensorInfo

_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**16
# values that a file may have for each layer
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length")
_PER_LAYER += ("attention.sliding_window", "feed_forward_length", "rope.dimension_count", "rope.freq_base")
_BY_LAYER = frozenset(f"{name}.{key}" for name in ("llama", "qwen2", "qwen3") for key in _PER_LAYER)


@dataclass(frozen=True)
class GgufFile:
    """What the header of a file says.

    values: metadata by key. An array, or a text of more than a megabyte, is a text that says how long it is.

    tensors: by their names in the file.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, BlockTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header, and those of the other parts if `path` is the first of several.

    Raises ModelLoadError if one is damaged, names bytes beyond the file's or an unknown type, or if a part is missing
    or of another file.
    """
    first = _read_part(path)
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
        found = _read_part(part) if number else first
        says = found.values.get("split.no", 0), found.values.get("split.count")
        if says != (number, count) or not tensors.keys().isdisjoint(found.tensors):
            raise ModelLoadError(f"{part} is no part {number + 1} of {path.name}", fix="download all parts again")
        tensors |= found.tensors
    if first.values.get("split.tensors.count", len(tensors)) != len(tensors):
        raise ModelLoadError(f"the parts of {path} have {len(tensors)} tensors", fix="download all parts again")
    return GgufFile(path, first.values, tensors)


def _read_part(path: Path) -> GgufFile:
    with open_header(path) as header:
        num_tensors, num_values = header.counts()
        values = {key: _one_number(value) for key, value in header.values(num_values, _BY_LAYER).items()}
        entries = [_Entry.read(header) for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"'general.alignment' is {alignment!r}")
        start = -(-header.position // alignment) * alignment
        return GgufFile(path, values, _located(path, entries, start, path.stat().st_size))


def _one_number(value: Any) -> Any:
    """Return the number that all entries of a list of numbers are; other values as they are, lists as Omitted."""
    if not isinstance(value, list):
        return value
    return value[0] if value and value.count(value[0]) == len(value) else Omitted(f"{len(value)} different numbers")


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
