"""The types of a GGUF file's tensors, and such a tensor read by rows: as numbers, or as the values that it has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.models.loading.file_formats.gguf_unpack import LAYOUTS, Layout, Unpacked
from jaxserve.models.loading.file_formats.safetensors_file import TensorInfo, read_rows
from jaxserve.system import install_command

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class BlockType:
    """A type: `count` numbers take `num_bytes`. dtype: of the numbers as they are read.

    layout: of the types that are kept in few bits. decode: bytes, uint8 [N, B], to float32 [N, K], of other types.
    """

    name: str
    count: int
    num_bytes: int
    dtype: np.dtype = _FLOAT32
    layout: Layout | None = None
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    def numbers(self, raw: np.ndarray) -> np.ndarray:
        """Decode rows raw, uint8 [N, B], to numbers [N, K] in `dtype`."""
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
    """Return the type of this number in the format.

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


@dataclass(frozen=True)
class BlockTensor:
    """A tensor. It is read from the file when it is needed.

    raw: its bytes, uint8 [rows, bytes of a row]. shape: of its numbers, rows first.
    head_rows: rows of a head whose two halves the file has interleaved; 0: the rows are in order.
    """

    raw: TensorInfo
    block: BlockType
    shape: tuple[int, ...]
    head_rows: int = 0

    @property
    def dtype(self) -> np.dtype:
        """The dtype of `rows`."""
        return self.block.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes in the file."""
        return self.raw.num_bytes

    def rows(self, first: int, last: int | None) -> np.ndarray:
        """Return the numbers of the rows [first, last) of the first axis. None: all."""
        last = self.raw.shape[0] if last is None else last
        return self.block.numbers(self._raw_rows(first, last)).reshape(-1, *self.shape[1:])

    def unpacked(self, first: int, last: int) -> Unpacked:
        """Return the rows [first, last) of a matrix as codes and scales. Its type must have a layout."""
        assert self.block.layout is not None
        return self.block.layout.read(self._raw_rows(first, last))

    def _raw_rows(self, first: int, last: int) -> np.ndarray:
        size = self.head_rows or 1
        begin, end = first // size * size, -(-last // size) * size
        raw = read_rows(self.raw, begin, end - begin, np.empty((end - begin) * self.raw.shape[1], np.uint8))
        if self.head_rows:
            raw = raw.reshape(-1, size // 2, 2, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)
        return raw[first - begin : last - begin]
