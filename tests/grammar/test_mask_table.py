"""The masks of a step: who makes them, who has to end and who waits."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jaxserve.grammar import mask_table
from jaxserve.grammar.mask_table import MaskTable
from jaxserve.grammar.token_mask import Matcher, TokenMask
from jaxserve.types.step import NUM_QUICK, QUICK, FinishReason, MaskBudget, ScheduledRow, SchedulerOutput, TokenOutput
from tests.fake_grammar import CountingMatcher, HandExecutor


class FailingMatcher(CountingMatcher):
    def fill(self, bitmask_row: np.ndarray) -> None:
        raise ValueError("limit")


def table_of(matchers: Sequence[Matcher], together: bool, calls: list[int]) -> MaskTable:
    def fill_rows(rows: Sequence[tuple[Matcher, int]], bits: np.ndarray) -> None:
        calls.append(len(rows))
        for matcher, row in rows:
            bits[row] = 0  # what a fill that breaks off leaves behind
            filled = np.full_like(bits[row], -1)
            matcher.fill(filled)
            bits[row] = filled

    table = MaskTable(70, fill_rows if together else None)
    for number, matcher in enumerate(matchers):
        words = ((number % 70,) * 2,)
        mask = TokenMask(matcher, words)
        mask.accept([0])
        table.add(str(number), mask)
    return table


def step_of(count: int) -> SchedulerOutput:
    rows = [ScheduledRow(str(i), i, 0, 1, True, [], 0, [], masked=i != 2) for i in range(count)]
    return SchedulerOutput(0, rows, count, [])


@pytest.mark.parametrize("count", [1, 3, 8])
def test_rows_filled_together_equal_rows_filled_alone(count: int) -> None:
    calls: list[int] = []
    tables = [
        table_of([CountingMatcher(modulus=i % 3 + 2, length=9) for i in range(count)], way, calls)
        for way in (True, False)
    ]
    for table in tables:
        table.of_step(step_of(count))
        assert calls == [], "nobody knows yet which of them are slow"
        for i in range(count):
            table._masks[str(i)].is_quick = True
    together, alone = (table.of_step(step_of(count)) for table in tables)
    assert (together.bits == alone.bits).all() and together.ended == alone.ended == []
    assert calls == ([count - 1] if count == 8 else []), "few rows wake no threads"


def test_one_failing_matcher_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    matchers = [FailingMatcher(2, 9) if i == 5 else CountingMatcher(2, 9) for i in range(8)]
    calls: list[int] = []
    table = table_of(matchers, True, calls)
    for i in range(8):
        table._masks[str(i)].is_quick = True
    bits, ended, late, paused = table.of_step(step_of(8))
    assert len(calls) == 1, "all together first, then one by one"
    assert ended == [("5", FinishReason.ERROR)] and not late and not paused and (bits[5] == -1).all()
    assert (bits[[0, 1, 3, 4, 6, 7]] != -1).any(axis=1).all()


class FullMatcher(CountingMatcher):
    """Runs into a limit while its mask is made, and then allows the end of the output alone, as the parser does."""

    full = False

    @property
    def limit_error(self) -> str | None:
        return "Too many items" if self.full else None

    def fill(self, bitmask_row: np.ndarray) -> None:
        self.full = True
        bitmask_row[:] = 0
        bitmask_row[0] = 1


@pytest.mark.parametrize("together", [False, True])
def test_a_limit_met_while_a_mask_is_made_ends_the_request(together: bool) -> None:
    matchers = [FullMatcher(2, 9) if i == 5 else CountingMatcher(2, 9) for i in range(8)]
    table = table_of(matchers, together, [])
    for i in range(8):
        table._masks[str(i)].is_quick = together
    bits, ended, *_ = table.of_step(step_of(8))
    assert ended == [("5", FinishReason.ERROR)] and (bits[5] == -1).all(), (
        "not the end of the output, which would pass for a complete text"
    )
    message, status = table.failure("5")
    assert "Too many items" in message and status == 400


def test_a_request_ends_when_its_masks_have_taken_too_long() -> None:
    table, budget, other = MaskTable(70), MaskBudget(), MaskBudget()
    for name, own in (("0", budget), ("1", budget), ("3", other)):
        table.add(name, TokenMask(CountingMatcher(2, 9), (), own))
    assert table.of_step(step_of(4)).ended == []
    budget.charge(MaskBudget.SECONDS, num_tokens=10)
    assert table.of_step(step_of(4)).ended == [], "each token earns some time"
    budget.charge(12 * MaskBudget.SECONDS_PER_TOKEN)
    assert sorted(name for name, _ in table.of_step(step_of(4)).ended) == ["0", "1"], (
        "the choices of one request, and no other"
    )
    message, status = table.failure("1")
    assert "2 s and 2 ms a token" in message and status == 400
    assert table.advance(TokenOutput(request_id="0", token_ids=[2])) is FinishReason.ERROR
    assert table.advance(TokenOutput(request_id="3", token_ids=[2])) is None


# --- masks that threads make


def in_threads(*names: str, matcher: type[CountingMatcher] = CountingMatcher) -> tuple[MaskTable, HandExecutor]:
    threads = HandExecutor()
    table = MaskTable(70, None, threads)
    for name in names:
        table.add(name, TokenMask(matcher(2, 9), ()))
    return table, threads


def slow(table: MaskTable, name: str) -> None:
    table._masks[name].budget.charge(2 * QUICK)


def test_a_slow_mask_is_made_by_a_thread_and_its_request_rests() -> None:
    table, threads = in_threads("0", "1")
    slow(table, "1")
    bits, ended, late, paused = table.of_step(step_of(2))
    assert (late, paused, ended) == ([1], {"1"}, []) and (bits[1] == -1).all() and (bits[0] != -1).any()
    assert table.take_ready() == [], "not made yet"
    threads.run(1)
    assert table.take_ready() == [("1", None)]
    again = table.of_step(step_of(2))
    assert again.late == [] and (again.bits[1] == bits[0]).all(), "the mask that the thread made"
    assert again.paused == {"1"}, "its next mask needs the token of this step"
    assert table.advance(TokenOutput(request_id="1", token_ids=[2])) is None and table.take_ready() == []
    threads.run(1)
    assert table.take_ready() == [("1", None)]


class AtOnce(HandExecutor):
    """A thread that is done before the loop looks again."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self.run(1)
        return future


def test_a_mask_that_a_thread_makes_within_the_step_is_used() -> None:
    """Else its row would sit out, and nobody would make the mask again."""
    table = MaskTable(70, None, AtOnce())
    table.add("0", TokenMask(CountingMatcher(2, 9, was_slow=True), ()))
    step = table.of_step(step_of(1))
    assert step.late == [] and (step.bits[0] != -1).any()
    table.advance(TokenOutput(request_id="0", token_ids=[2]))
    assert table.take_ready() == [("0", None)]


def test_after_enough_quick_masks_the_loop_makes_them_again() -> None:
    table, _ = in_threads("0")
    slow(table, "0")
    for _ in range(NUM_QUICK):
        assert table._masks["0"].is_slow
        table._masks["0"].budget.charge(QUICK / 2)
    assert table.of_step(step_of(1)).late == []


@pytest.mark.parametrize(
    ("token", "matcher", "end"),
    [(2, CountingMatcher, None), (3, CountingMatcher, FinishReason.ERROR), (2, FailingMatcher, FinishReason.ERROR),
     (2, FullMatcher, FinishReason.ERROR)],
)  # fmt: skip
def test_an_end_that_a_thread_finds(
    token: int, matcher: type[CountingMatcher], end: FinishReason | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    table, threads = in_threads("0", matcher=matcher)
    slow(table, "0")
    table._paused.add("0")
    assert table.advance(TokenOutput(request_id="0", token_ids=[token])) is None
    threads.run(1)
    assert table.take_ready() == [("0", end)]


def test_a_complete_grammar_that_a_thread_finds_is_a_stop() -> None:
    table, threads = in_threads("0")
    table.advance(TokenOutput(request_id="0", token_ids=[2] * 9), here=False)
    threads.run(1)
    assert table.of_step(step_of(1)).ended == [("0", FinishReason.STOP)]


def test_a_step_waits_for_its_masks_no_longer_than_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(CountingMatcher):
        def fill(self, bitmask_row: np.ndarray) -> None:
            super().fill(bitmask_row)
            began = time.thread_time()  # as masks are measured: it stands still while the machine does other things
            while time.thread_time() - began < 0.002:
                pass

    monkeypatch.setattr(mask_table, "PATIENCE", 0.001)
    table, threads = in_threads("0", "1", "3", "4", matcher=Slow)
    first = table.of_step(step_of(5))
    assert first.late == [1, 3, 4] and first.paused == {"0"}, "the first one took all the time there was"
    assert threads.tasks == [], "the others are not slow for all that is known: the next step begins with them"
    assert table.of_step(step_of(5)).late == [0, 3, 4]


def test_what_was_dropped_is_not_made() -> None:
    table, threads = in_threads("0")
    slow(table, "0")
    table.of_step(step_of(1))
    table.drop("0")
    assert threads.tasks[0][0].cancelled() and table.take_ready() == [] and len(table) == 0


def test_a_grammar_that_was_slow_starts_in_a_thread() -> None:
    threads = HandExecutor()
    table = MaskTable(70, None, threads)
    table.add("0", TokenMask(CountingMatcher(2, 9, was_slow=True), ()))
    assert threads.tasks == [], "a request that waits for a slot takes no thread from those that run"
    assert table.of_step(step_of(1)).late == [0] and len(threads.tasks) == 1


def test_a_matcher_that_a_thread_has_is_left_alone() -> None:
    table, _ = in_threads("0", "1")
    slow(table, "0")
    table.of_step(step_of(2))
    assert table.of_step(step_of(2)).late == [0]
    table._masks["0"].budget.charge(2 * MaskBudget.SECONDS)
    assert table.of_step(step_of(2)).ended == [("0", FinishReason.ERROR)] and table.failure("0")[1] == 400
    table.close()
