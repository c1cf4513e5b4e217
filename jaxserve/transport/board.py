"""A table of numbers in memory that several processes share. Each process writes one row and reads all of them.

A number is 8 bytes, aligned, so that a reader sees it whole. There is no lock.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence


class Board:
    """float64 [rows, columns], zero at first. descriptor: of a file made by `create`"""

    def __init__(self, descriptor: int, num_rows: int, num_columns: int) -> None:
        self._memory = mmap.mmap(descriptor, num_rows * num_columns * 8)
        numbers = memoryview(self._memory).cast("d")
        self.rows: Sequence[memoryview[float]] = [
            numbers[start : start + num_columns] for start in range(0, num_rows * num_columns, num_columns)
        ]

    @staticmethod
    def create(num_rows: int, num_columns: int) -> int:
        """Return the descriptor of a new file without a name."""
        descriptor, path = tempfile.mkstemp(prefix="jaxserve-board-")
        os.unlink(path)
        os.ftruncate(descriptor, num_rows * num_columns * 8)
        return descriptor

    def total(self, column: int) -> float:
        """Return the sum of one number over all processes."""
        return sum(row[column] for row in self.rows)

    def clear(self, row: int) -> None:
        """Set the numbers of a process that has ended to zero."""
        for column in range(len(self.rows[row])):
            self.rows[row][column] = 0.0
