"""Finds the request that kills the engine process, like FaultIsolator.

A failure costs a restart, which takes 20 s and more on a GPU.

a group of one unit fails       it is accused and not tried again until another group passes; then it is to blame
all suspects are accused        another request is tried as a witness; if there is none, all are to blame
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from jaxserve.client.sequences.sequence_table import LiveSequence
from jaxserve.types.fault_isolator import FaultIsolator


class ProcessFaultIsolator(FaultIsolator):
    """Identifies sequences by their keys. The choices of one request are a unit."""

    # A group costs some steps, a crash costs a restart. 256 requests, tried in 16 groups and then in 16 groups of one,
    # need 3 crashes; halves would need 9.
    parts = 16
    passes = 4  # when the process dies, two steps may be on the device and two outputs on their way
    whole_first = False

    def __init__(self) -> None:
        super().__init__()
        self._accused: dict[str, list[str]] = {}  # units that failed alone -> their requests

    def __bool__(self) -> bool:
        return super().__bool__() or bool(self._accused)

    def unit_of(self, name: str) -> str:
        return LiveSequence.unit_of(name)

    def died(self, rows: list[str], witness: Sequence[str]) -> list[str]:
        """Note that the process died with these in work. Returns the units to blame if known. Raises DeviceFaultError.

        witness: a request that is not a suspect, if there is one
        """
        unit = self.failed(rows)
        if unit is not None:
            return [unit]
        if self._groups or not self._accused:
            return []
        self._add(witness, 1)
        return [] if witness else self._verdict()

    def _divide(self, group: dict[str, int], rows: list[str]) -> str | None:
        units = {self.unit_of(name) for name in rows}
        if self.has_passed or len(units) > 1:
            return super()._divide(group, rows)
        self._accused[units.pop()] = rows
        self._add([name for name in group if name not in rows], 1)
        return None

    def gave(self, outputs: Iterable[tuple[str, bool]]) -> list[str]:
        """Note outputs, like `take`. Returns the units to blame if a group has passed."""
        self.take(outputs)
        return self._verdict() if self.has_passed else []

    def _verdict(self) -> list[str]:
        culprit = list(self._accused)
        self._accused.clear()
        return culprit

    def keep(self, live: Collection[str]) -> None:
        """Keep only live requests. If no group is left, the accused are tried again one by one."""
        super().keep(live)
        accused = {unit: [name for name in rows if name in live] for unit, rows in self._accused.items()}
        self._accused = {unit: rows for unit, rows in accused.items() if rows}
        if not self._groups:  # all requests that could have passed have ended
            for rows in self._accused.values():
                self._add(rows, 1)
            self._accused.clear()

    def is_suspect(self, name: str) -> bool:
        return any(name in group for group in self._groups) or name in self._accused.get(self.unit_of(name), ())
