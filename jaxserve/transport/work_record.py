"""Records the requests in work before the engine starts on them. The API process reads the record after a crash.

A request is in work from the dispatch of a step that contains it until two steps later, because two steps may be on
the device at once. It is also in work while it is received or its grammar is compiled.
"""

from __future__ import annotations

from jaxserve.transport.shared_state import SharedState
from jaxserve.types.step import SchedulerOutput, StepHandle, StepRunner


class WorkRecord:
    """Writes only changes: 256 rows that continue to decode cost 5 us per step, 256 new rows 20 us."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._step: list[str] = []  # ids of the latest step
        self._written: list[str] = []  # ids of the two latest steps
        self._others: list[str] = []

    def dispatching(self, ids: list[str]) -> None:
        """Record that a step with these rows is dispatched next."""
        rows = ids if ids == self._step else list(dict.fromkeys(self._step + ids))
        self._step = ids
        if rows != self._written:
            self._written = rows
            self._state.write(rows + self._others)

    def taking_in(self, ids: list[str]) -> None:
        """Record that exactly these requests are being received or compiled."""
        if ids != self._others:
            self._others = ids
            self._state.write(self._written + ids)


class RecordingRunner:
    """A StepRunner that records each step before it dispatches it."""

    def __init__(self, inner: StepRunner, record: WorkRecord) -> None:
        self._inner = inner
        self._record = record

    def execute(self, output: SchedulerOutput) -> StepHandle:
        if output.rows:
            self._record.dispatching([row.request_id for row in output.rows])
        return self._inner.execute(output)

    def rebuild(self) -> None:
        self._inner.rebuild()

    def num_compiles(self) -> int:
        return self._inner.num_compiles()

    def close(self) -> None:
        self._inner.close()
