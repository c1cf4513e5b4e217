"""Which request makes the device fail: those of a failed step are tried again, and in halves where that fails too.

    a step fails              its requests are a group, tried again while everybody else waits
    a step of a group fails   its requests are two groups, tried after the other groups there are
    a group of one fails      that request is to blame, if another group passed: else the others are tried first
    PASSES outputs of each    the group passed

A single fault ends nobody, one bad request among n is found in log2(n) + 3 failures, and a device that fails whoever
is there blames nobody. Knows ids, no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from jaxserve.engine.request import TokenOutput
from jaxserve.errors import JaxserveError

PASSES = 2  # outputs: of the tokens so far, computed again, and of a decode step after them
MAX_FAILURES = 16  # with no group that passed; by then each eighth of the requests has failed by itself


class NobodyToBlame(JaxserveError):
    """The device failed whichever of its requests were there."""


class Suspects:
    """Requests of the latest failed step that are not cleared yet. True while there are any."""

    def __init__(self) -> None:
        self._groups: deque[dict[str, int]] = deque()  # by id the outputs until it passed; the first is being tried
        self.has_passed = False  # any group since the first failure
        self._num_failures = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def on_trial(self) -> Collection[str] | None:
        """The only requests that may start now; None: all."""
        return self._groups[0].keys() if self._groups else None

    def failed(self, rows: list[str]) -> str | None:
        """A step with these failed. The request that is to blame, once it is known. Raises NobodyToBlame."""
        if not self._groups:
            self.has_passed, self._num_failures = False, 0
            self._groups.append(dict.fromkeys(rows, PASSES))
        elif rows and self._groups[0].keys() >= set(rows):
            return self._divide(self._groups.popleft(), rows)
        return None  # where others were in the step too: once more without them

    def _divide(self, group: dict[str, int], rows: list[str]) -> str | None:
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES and not self.has_passed:
            raise NobodyToBlame(f"the device failed {MAX_FAILURES} times, whichever requests were there")
        absent = [name for name in group if name not in rows]
        if len(rows) == 1 and (self.has_passed or not (absent or self._groups)):
            guilty = rows.pop()
        else:
            guilty = None
        middle = len(rows) // 2
        parts = (rows[:middle], rows[middle:], absent)
        self._groups.extend(dict.fromkeys(part, PASSES) for part in parts if part)
        return guilty

    def take(self, outputs: Iterable[TokenOutput]) -> None:
        """Outputs of a step that did not fail."""
        group = self._groups[0] if self._groups else {}
        for output in outputs:
            if output.request_id in group:
                group[output.request_id] -= 1
                if output.finish_reason is not None or not group[output.request_id]:
                    del group[output.request_id]
        if self._groups and not group:
            self._groups.popleft()
            self.has_passed = True

    def keep(self, live: Collection[str]) -> None:
        """Forget all others: they ended by themselves."""
        remaining = ({name: left for name, left in group.items() if name in live} for group in self._groups)
        self._groups = deque(group for group in remaining if group)
