"""Log lines of the engine: rates over the time since the last line, one last line, and none of a quiet server."""

import pytest

from jaxserve.engine.server import StatsLog
from jaxserve.types.messages import EngineStats


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def test_lines_say_what_happened_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    log = StatsLog(interval=10.0, num_pages=100, page_size=16)
    stats = EngineStats(
        num_running=3, num_waiting=2, computed_prompt_tokens=50, cached_tokens=16, generation_tokens=20,
        num_pages_used=25, steps=7, preemptions=1,
    )  # fmt: skip
    log.update(lambda: stats, busy=False, now=0.0)
    log.update(lambda: stats, busy=True, now=100.0)  # it was idle until now
    log.update(lambda: stats, busy=True, now=109.0)
    assert not caplog.messages
    log.update(lambda: stats, busy=True, now=110.0)
    assert caplog.messages == [
        "prefill: new tokens 50, cached tokens 16, 5.0 tokens/s, running 3, queued 2",
        "decode: running 3, queued 2, 2.0 tokens/s, KV tokens 400 (0.25), steps 7, retracted 1",
    ]


def test_a_line_says_why_requests_wait(caplog: pytest.LogCaptureFixture) -> None:
    log = StatsLog(interval=10.0, num_pages=10, page_size=16, reasons=lambda: ["pages", "its turn", "its turn"])
    log.update(EngineStats, busy=True, now=0.0)
    log.update(lambda: EngineStats(num_waiting=3), busy=True, now=10.0)
    assert "waiting: 2 for its turn; 1 for pages" in caplog.messages


def test_the_last_line_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is about the time until the work ended, not until the line."""
    log = StatsLog(interval=10.0, num_pages=10, page_size=16)
    log.update(EngineStats, busy=True, now=0.0)
    log.update(lambda: EngineStats(generation_tokens=100, steps=100), busy=True, now=10.0)
    assert len(caplog.messages) == 1
    end = EngineStats(generation_tokens=120, steps=120)
    log.update(lambda: end, busy=True, now=14.0)
    for now in range(15, 60):
        log.update(lambda: end, busy=False, now=float(now))
    assert caplog.messages[1:] == [
        "decode: running 0, queued 0, 5.0 tokens/s, KV tokens 0 (0.00), steps 20, retracted 0, idle"
    ]


def test_requests_of_a_quiet_server_leave_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """And no tokens for the first line that comes after them."""
    log = StatsLog(interval=10.0, num_pages=10, page_size=16)
    steps = 0

    def turn(now: float, *, busy: bool) -> None:
        log.update(lambda: EngineStats(generation_tokens=steps, steps=steps), busy=busy, now=now)

    for second in range(0, 300, 30):
        turn(second, busy=True)
        steps += 8
        for pause in range(1, 30):
            turn(second + pause, busy=False)
    assert not caplog.messages
    turn(300.0, busy=True)
    steps += 5
    turn(310.0, busy=True)
    assert ["steps 5," in line for line in caplog.messages] == [True]


def test_short_pauses_do_not_hide_a_busy_server(caplog: pytest.LogCaptureFixture) -> None:
    """A client that asks one request after the other: a line an interval, none at each of its pauses."""
    log = StatsLog(interval=10.0, num_pages=10, page_size=16)
    for tenth in range(1000):
        log.update(EngineStats, busy=tenth % 10 != 9, now=tenth / 10)
    assert len(caplog.messages) == 9
