"""Log lines of the engine: rates over the time since the last line, and one last line when it goes idle."""

import pytest

from jaxserve.engine.messages import EngineStats
from jaxserve.engine.stats_log import StatsLog


def test_lines_tell_what_happened_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = StatsLog(interval=10.0, num_pages=100, page_size=16)
    assert not log.due(busy=False, now=0.0)
    assert not log.due(busy=True, now=100.0)  # it was idle until now
    assert not log.due(busy=True, now=109.0)
    assert log.due(busy=True, now=110.0)
    stats = EngineStats(
        num_running=3, num_waiting=2, computed_prompt_tokens=50, cached_tokens=16, generation_tokens=20,
        num_pages_used=25, steps=7, preemptions=1,
    )  # fmt: skip
    log.log(stats, busy=True, now=110.0)
    assert caplog.messages == [
        "prefill: new tokens 50, cached tokens 16, 5.0 tokens/s, running 3, queued 2",
        "decode: running 3, queued 2, 2.0 tokens/s, KV tokens 400 (0.25), steps 7, retracted 1",
    ]


def test_the_last_line_comes_at_once_and_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = StatsLog(interval=10.0, num_pages=10, page_size=16)
    log.due(busy=True, now=0.0)
    assert log.due(busy=False, now=1.0)
    log.log(EngineStats(generation_tokens=5, steps=5), busy=False, now=1.0)
    assert caplog.messages == [
        "decode: running 0, queued 0, 5.0 tokens/s, KV tokens 0 (0.00), steps 5, retracted 0, idle"
    ]
    assert not log.due(busy=False, now=50.0)
