"""The programs of a runner by family and size, some of which may be compiled only later.

A step takes the smallest program that is there and large enough. The largest of each family that steps need is there
from the start, so that every step finds one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import jax


class ProgramTable:
    """Programs by family and size, ascending. One thread at a time may `add`; others may look for programs."""

    def __init__(self, families: Mapping[str, Sequence[int]], compiled: Mapping[str, jax.stages.Compiled]) -> None:
        self.by_size: dict[str, dict[int, jax.stages.Compiled]] = {family: {} for family in families}
        self._sizes: dict[str, tuple[int, ...]] = dict.fromkeys(families, ())
        for name, program in compiled.items():
            self.add(name, program)

    def add(self, name: str, program: jax.stages.Compiled) -> None:
        """Add the program `family[size]`. Any other name is ignored."""
        family, bracket, size = name.rstrip("]").partition("[")
        if bracket and family in self.by_size:
            by_size = self.by_size[family] | {int(size): program}
            self.by_size[family] = dict(sorted(by_size.items()))
            self._sizes[family] = tuple(self.by_size[family])  # last: another thread reads it

    def sizes(self, family: str) -> tuple[int, ...]:
        """Return the sizes that are there, ascending."""
        return self._sizes[family]

    def find(self, family: str, count: int) -> int | None:
        """Return the smallest size that is there and holds `count`; None: there is none."""
        sizes = self._sizes[family]
        index = bisect_left(sizes, count)
        return sizes[index] if index < len(sizes) else None

    def fit(self, family: str, count: int) -> int:
        """Return the smallest size that is there and holds `count`. Raises ValueError if there is none."""
        size = self.find(family, count)
        if size is None:
            largest = max(self._sizes[family], default=0)
            raise ValueError(f"{count} is above the largest bucket, {largest}, of the {family} programs")
        return size
