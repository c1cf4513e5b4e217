"""A tensor in memory, in place of one in a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class HeldTensor:
    """An array with the methods of a tensor in a file.

    array: a numpy or jax array. It is read when it is needed, and not changed.
    """

    array: Any

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, last: int | None) -> np.ndarray:
        """Return the rows [first, last) of the first axis, or all rows if last is None. Do not change them."""
        whole = np.asarray(self.array)
        return whole if last is None else whole[first:last]
