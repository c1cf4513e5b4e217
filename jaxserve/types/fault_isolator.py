"""Finds the request that makes the engine fail, by running groups of the requests of a failed step in isolation.

suspect: a request of a failed step that is not cleared yet. unit: the requests that are blamed together.

    a step fails              its requests become one group or several; all other requests wait
    a step of a group fails   its requests become several groups, tried after the other groups
    a group of one unit fails this unit is to blame if another group passed; otherwise the others are tried first
    PASSES outputs of each    the group passed

A single transient fault ends no request. One bad request among n is found in log2(n) + 3 failures if groups are
halves. A device that fails on every request blames none of them. The search only knows ids: EngineCore looks for a
request that makes steps fail; in the API process ProcessFaultIsolator looks for one that kills the engine process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from jaxserve.errors import JaxserveError

PASSES = 2  # outputs of a request: its tokens so far, computed again, and one decode step after them
MAX_FAILURES = 16  # in a row without a group that passed; by then each eighth of the requests has failed by itself


class DeviceFaultError(JaxserveError):
    """The device failed with each group of requests, so no single request is the cause."""


class FaultIsolator:
    """The requests of the latest failed step that are not cleared yet. The isolator is true if there are any.

    parts         number of groups that a failed group is split into
    passes        outputs of each request until its group has passed
    whole_first   try the requests of the first failure as one group, because most faults happen once
    """

    parts = 2
    passes = PASSES
    whole_first = True

    def __init__(self) -> None:
        # request id -> outputs left until it passed; the first group is being tried
        self._groups: deque[dict[str, int]] = deque()
        self.has_passed = False  # a group passed since the first failure
        self._num_failures = 0

    def unit_of(self, name: str) -> str:
        """Return the unit of a request. Requests of one unit stay in one group."""
        return name

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def quarantined(self) -> Collection[str] | None:
        """The only requests that may run now; None: all."""
        return self._groups[0].keys() if self._groups else None

    def failed(self, rows: list[str]) -> str | None:
        """Record that a step with these requests failed. Return the unit to blame once it is known.

        Raises DeviceFaultError if no single request is the cause.
        """
        if not self._groups:
            self.has_passed, self._num_failures = False, 0
            self._add(rows, 1 if self.whole_first else self.parts)
        elif rows and self._groups[0].keys() >= set(rows):
            return self._divide(self._groups.popleft(), rows)
        return None  # other requests were in the step too: try once more without them

    def _divide(self, group: dict[str, int], rows: list[str]) -> str | None:
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES and not self.has_passed:
            raise DeviceFaultError(f"the device failed {MAX_FAILURES} times, whichever requests were there")
        units = {self.unit_of(name) for name in rows}
        absent = [name for name in group if name not in rows]
        culprit = None
        if len(units) == 1 and (self.has_passed or not (absent or self._groups)):
            culprit, rows = units.pop(), []
        self._add(rows, self.parts)
        self._add(absent, 1)
        return culprit

    def _add(self, rows: Sequence[str], parts: int) -> None:
        """Queue the requests as groups with about the same number of units."""
        units: dict[str, list[str]] = {}
        for name in rows:
            units.setdefault(self.unit_of(name), []).append(name)
        members = list(units.values())
        count = min(parts, len(members))
        for part in range(count):
            chosen = members[part * len(members) // count : (part + 1) * len(members) // count]
            self._groups.append({name: self.passes for unit in chosen for name in unit})

    def succeeded(self, outputs: Iterable[tuple[str, bool]]) -> None:
        """Record that a step succeeded. outputs: its request ids, each with whether the request has ended"""
        group = self._groups[0] if self._groups else {}
        for name, ended in outputs:
            if name in group:
                group[name] -= 1
                if ended or not group[name]:
                    del group[name]
        if self._groups and not group:
            self._groups.popleft()
            self.has_passed = True

    def keep(self, live: Collection[str]) -> None:
        """Keep only these requests, because the others have ended."""
        remaining = ({name: left for name, left in group.items() if name in live} for group in self._groups)
        self._groups = deque(group for group in remaining if group)
