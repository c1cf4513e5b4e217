"""The types of a GGUF file's tensors, and such a tensor read by rows.

A row is whole blocks of numbers. A block of Q8_0 and Q4_0 is a float16 scale and 32 codes of 8 or 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.installation import install_command
from jaxserve.models.loading.file_formats.safetensors_file import TensorInfo, read_rows
from jaxserve.ops.quantized import BLOCK, MIDDLE

Role = Literal["numbers", "values", "scales"]
_SCALE_BYTES = 2
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class BlockType:
    """A type: `count` numbers take `num_bytes`. dtype: of the numbers as they are read.

    bits: of the codes of Q8_0 and Q4_0, else 0. decode: bytes, uint8 [N, B], to float32 [N, K]; None: by dtype or bits.
    """

    name: str
    count: int
    num_bytes: int
    dtype: np.dtype = _FLOAT32
    bits: int = 0
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    def read(self, raw: np.ndarray, role: Role) -> np.ndarray:
        """Decode rows raw, uint8 [N, B], by role.

        numbers: [N, K] in `dtype`. values: the codes [N, K]. scales: float16 [N, K / 32].
        """
        if self.decode is not None:
            return self.decode(raw)
        if not self.bits:
            return raw.view(self.dtype)
        blocks = raw.reshape(len(raw), -1, self.num_bytes)
        scales, codes = blocks[..., :_SCALE_BYTES].copy().view(np.float16), blocks[..., _SCALE_BYTES:]
        if role == "scales":
            return scales[..., 0]
        codes = codes.view(np.int8) if self.bits == 8 else np.concatenate([codes & 15, codes >> 4], axis=-1)
        if role == "numbers":
            codes = (codes.astype(np.float32) - (0 if self.bits == 8 else MIDDLE)) * scales.astype(np.float32)
        return codes.reshape(len(raw), -1)


_KNOWN = MappingProxyType(
    {
        0: BlockType("F32", 1, 4),
        1: BlockType("F16", 1, 2, np.dtype(np.float16)),
        2: BlockType("Q4_0", BLOCK, _SCALE_BYTES + BLOCK // 2, bits=4),
        8: BlockType("Q8_0", BLOCK, _SCALE_BYTES + BLOCK, bits=8),
        30: BlockType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    }
)


def block_type(number: int) -> BlockType:
    """Return the type of this number in the format.

    Raises ValueError if it is unknown or cannot be decoded, ModelLoadError if that needs a package that is missing.
    """
    return _KNOWN[number] if number in _KNOWN else _decoded(number)


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
    """A tensor, its codes, or its scales. It is read from the file when it is needed.

    raw: its bytes, uint8 [rows, bytes of a row]. shape: that of the role, rows first.
    head_rows: rows of a head whose two halves the file has interleaved; 0: the rows are in order.
    """

    raw: TensorInfo
    block: BlockType
    shape: tuple[int, ...]
    role: Role = "numbers"
    head_rows: int = 0

    @property
    def dtype(self) -> np.dtype:
        """The dtype of `rows`."""
        codes = np.dtype(np.int8 if self.block.bits == 8 else np.uint8)
        return {"numbers": self.block.dtype, "values": codes, "scales": np.dtype(np.float16)}[self.role]

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes in the file."""
        scales = self.raw.num_bytes // self.block.num_bytes * _SCALE_BYTES
        return {"numbers": self.raw.num_bytes, "values": self.raw.num_bytes - scales, "scales": scales}[self.role]

    def rows(self, first: int, last: int | None) -> np.ndarray:
        """Return the rows [first, last) of the first axis. None: all."""
        last = self.raw.shape[0] if last is None else last
        return self.block.read(self._raw_rows(first, last), self.role).reshape(-1, *self.shape[1:])

    def _raw_rows(self, first: int, last: int) -> np.ndarray:
        size = self.head_rows or 1
        begin, end = first // size * size, -(-last // size) * size
        raw = read_rows(self.raw, begin, end - begin, np.empty((end - begin) * self.raw.shape[1], np.uint8))
        if self.head_rows:
            raw = raw.reshape(-1, size // 2, 2, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)
        return raw[first - begin : last - begin]
