"""Writes down which requests the engine works on, before it does, where the API process finds it after a death.

A request is in work from the dispatch of a step with it until two steps later, since two steps may be on the device
at once, and while it is taken in or its grammar is compiled.
"""

from __future__ import annotations

from jaxserve.transport.shared_state import SharedState
from jaxserve.types.step import Runner, SchedulerOutput, StepHandle


class WorkRecord:
    """Writes only what has changed: 256 rows that go on decoding cost 5 us a step, as many new ones 20 us."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._step: list[str] = []  # of the latest step
        self._written: list[str] = []  # of the two latest steps
        self._others: list[str] = []

    def dispatching(self, ids: list[str]) -> None:
        """A step of these rows is dispatched next."""
        rows = ids if ids == self._step else list(dict.fromkeys(self._step + ids))
        self._step = ids
        if rows != self._written:
            self._written = rows
            self._state.write(rows + self._others)

    def taking_in(self, ids: list[str]) -> None:
        """These are taken in, or their grammars compiled, and no others."""
        if ids != self._others:
            self._others = ids
            self._state.write(self._written + ids)


class RecordingRunner:
    """A Runner that writes down each step before it dispatches it."""

    def __init__(self, inner: Runner, record: WorkRecord) -> None:
        self._inner = inner
        self._record = record

    def execute(self, output: SchedulerOutput) -> StepHandle:
        self._record.dispatching([row.request_id for row in output.rows])
        return self._inner.execute(output)

    def rebuild(self) -> None:
        self._inner.rebuild()

    def num_compiles(self) -> int:
        return self._inner.num_compiles()
