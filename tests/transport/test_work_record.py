"""What is written down of the requests in work, as another process would find it at any moment."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from jaxserve.transport.shared_state import RecordingRunner, SharedState, WorkRecord
from jaxserve.types.step import EncodePart, SchedulerOutput
from tests.fakes import FakeRunner, FakeStep, make_core, make_request, small_config


class Counting(SharedState):
    """Counts its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, ids: list[str]) -> None:
        self.writes += 1
        super().write(ids)


def test_two_steps_are_in_work_at_once() -> None:
    state = SharedState()
    record = WorkRecord(state)
    seen = []
    for rows in (["a", "b"], ["b", "c"], ["c"], ["c"], ["d"]):
        record.dispatching(rows)
        seen.append(state.in_work)
    assert seen == [["a", "b"], ["a", "b", "c"], ["b", "c"], ["c"], ["c", "d"]]


def test_requests_that_are_taken_in_are_in_work() -> None:
    state = SharedState()
    record = WorkRecord(state)
    record.dispatching(["a"])
    record.taking_in(["x", "y"])
    assert state.in_work == ["a", "x", "y"]
    record.dispatching(["a", "b"])
    assert state.in_work == ["a", "b", "x", "y"]
    record.taking_in([])
    assert state.in_work == ["a", "b"]


def test_rows_that_stay_are_written_once() -> None:
    state = Counting()
    record = WorkRecord(state)
    for _ in range(100):
        record.taking_in([])
        record.dispatching([f"r{i}" for i in range(64)])
    assert state.writes == 1


class Looking(FakeRunner):
    """Asks at each dispatch, which may be its last, what is written down."""

    def __init__(self, look: Callable[[], list[str]]) -> None:
        super().__init__(small_config())
        self._look = look
        self._before: set[str] = set()

    def execute(self, output: SchedulerOutput) -> FakeStep:
        rows = {row.request_id for row in output.rows}
        assert set(self._look()) == rows | self._before
        self._before = rows
        return super().execute(output)


def test_a_request_is_in_work_while_its_pictures_are_encoded() -> None:
    state = SharedState()
    runner = RecordingRunner(Mock(), WorkRecord(state))
    runner.execute(SchedulerOutput(1, [], 0, [], encodes=[EncodePart((), 0, 1, [], ("a",))]))
    assert state.in_work == ["a"]


@pytest.mark.parametrize("requests", [1, 20])
def test_a_step_is_written_down_before_it_is_dispatched(requests: int) -> None:
    """Over requests that come, wait, run and end."""
    state = SharedState()
    core = make_core(small_config())
    core.runner = RecordingRunner(Looking(lambda: state.in_work), WorkRecord(state))
    for number in range(requests):
        core.add(make_request(f"r{number}", range(1, 2 + number % 7), max_tokens=3 + number % 5))
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
    assert steps >= 4
