"""The blocks of GGUF's quantised types as values, scales and minima: a number is value * scale - minimum in float32.

A block of K-quants (Q4_K, Q5_K, Q6_K) is 256 numbers in groups of 32 or 16, whose scales and minima are integers times
a scale of the block. Blocks of the other types are one group. The layouts are those of ggml's ggml-quants.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxserve.ops.quantized import BLOCK, MIDDLE

_K_BLOCK = 256  # numbers of a block of K-quants
_Fields = tuple[np.ndarray, ...]


class Unpacked(NamedTuple):
    """values [N, K]: int8, or uint8 if they have 4 bits. scales, minima: float32 [N, K / group].

    Without minima the minimum of values of 4 bits is 8 times the scale, and that of others is 0.
    """

    values: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None

    def numbers(self) -> np.ndarray:
        """Return the numbers, float32 [N, K]."""
        groups = self.values.reshape(*self.scales.shape, -1).astype(np.float32)
        if self.minima is None and self.values.dtype == np.uint8:
            groups -= MIDDLE
        groups *= self.scales[..., None]
        if self.minima is not None:
            groups -= self.minima[..., None]
        return groups.reshape(self.values.shape)


@dataclass(frozen=True)
class Layout:
    """How the blocks of a type lie in a file.

    count: numbers of a block. sizes: bytes of its fields. unpack: the fields, uint8 [N, B, size], to `Unpacked`.
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
    """Return the float16 numbers of a field as float32."""
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
    """Return scales and minima, float32 [N, B, 8]: integers of 6 bits, packed in 12 bytes, times those of the block."""
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
