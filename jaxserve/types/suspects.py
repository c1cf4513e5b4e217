"""Which request makes the engine fail: those of a failed step are tried again apart from all others, in groups.

    a step fails              its requests are one group or several; everybody else waits
    a step of a group fails   its requests are several groups, tried after the other groups there are
    a group of one fails      that request is to blame, if another group passed: else the others are tried first
    PASSES outputs of each    the group passed

A single fault ends nobody, one bad request among n is found in log2(n) + 3 failures where groups are halves, and a
device that fails whoever is there blames nobody. Knows ids, no device: the engine's core looks for a request that
makes steps fail, and the API process, with ProcessSuspects, for one that ends the engine's process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from jaxserve.errors import JaxserveError

PASSES = 2  # outputs: of the tokens so far, computed again, and of a decode step after them
MAX_FAILURES = 16  # with no group that passed; by then each eighth of the requests has failed by itself


class NobodyToBlame(JaxserveError):
    """The device failed whichever of its requests were there."""


class Suspects:
    """Requests of the latest failed step that are not cleared yet. True while there are any.

    parts         groups that a failed group becomes
    passes        outputs of each request until its group has passed
    whole_first   the requests of the first failure are one group, since most faults come once
    """

    parts = 2
    passes = PASSES
    whole_first = True

    def __init__(self) -> None:
        self._groups: deque[dict[str, int]] = deque()  # by id the outputs until it passed; the first is being tried
        self.has_passed = False  # any group since the first failure
        self._num_failures = 0

    def unit_of(self, name: str) -> str:
        """What is to blame for a request: requests of one unit stay in one group."""
        return name

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def on_trial(self) -> Collection[str] | None:
        """The only requests that may start now; None: all."""
        return self._groups[0].keys() if self._groups else None

    def failed(self, rows: list[str]) -> str | None:
        """A step with these failed. The unit that is to blame, once it is known. Raises NobodyToBlame."""
        if not self._groups:
            self.has_passed, self._num_failures = False, 0
            self._add(rows, 1 if self.whole_first else self.parts)
        elif rows and self._groups[0].keys() >= set(rows):
            return self._divide(self._groups.popleft(), rows)
        return None  # where others were in the step too: once more without them

    def _divide(self, group: dict[str, int], rows: list[str]) -> str | None:
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES and not self.has_passed:
            raise NobodyToBlame(f"the device failed {MAX_FAILURES} times, whichever requests were there")
        units = {self.unit_of(name) for name in rows}
        absent = [name for name in group if name not in rows]
        guilty = None
        if len(units) == 1 and (self.has_passed or not (absent or self._groups)):
            guilty, rows = units.pop(), []
        self._add(rows, self.parts)
        self._add(absent, 1)
        return guilty

    def _add(self, rows: Sequence[str], parts: int) -> None:
        """Queue the requests as groups of about as many units each."""
        units: dict[str, list[str]] = {}
        for name in rows:
            units.setdefault(self.unit_of(name), []).append(name)
        members = list(units.values())
        count = min(parts, len(members))
        for part in range(count):
            chosen = members[part * len(members) // count : (part + 1) * len(members) // count]
            self._groups.append({name: self.passes for unit in chosen for name in unit})

    def take(self, outputs: Iterable[tuple[str, bool]]) -> None:
        """Ids of a step that did not fail, each with whether its request has ended by it."""
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
        """Forget all others: they ended by themselves."""
        remaining = ({name: left for name, left in group.items() if name in live} for group in self._groups)
        self._groups = deque(group for group in remaining if group)
