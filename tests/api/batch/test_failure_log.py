"""What the log says of requests of a batch that fail by the server's fault."""

import asyncio
import logging
from pathlib import Path

import pytest

from jaxserve.api.batch.failure_log import LOG_INTERVAL, FailureLog
from jaxserve.errors import EngineDeadError
from tests.api.batch.helpers import Bench, ended, input_file, submit


def test_sums_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    failures = FailureLog("batch_1", clock=lambda: now)
    failures.note(EngineDeadError("gone"))
    for _ in range(50_000):
        failures.note(EngineDeadError("gone"))
    failures.note(KeyError("x" * 10_000))
    assert len(caplog.records) == 1
    now += LOG_INTERVAL
    failures.note(EngineDeadError("late"))
    failures.flush()
    failures.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "batch batch_1: 1 attempts failed: 1 x gone",
        "batch batch_1: 50002 attempts failed: 50000 x gone; 1 x unexpected KeyError; 1 x late",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert caplog.records[1].exc_info and not caplog.records[0].exc_info


def test_a_batch_whose_every_request_fails_is_two_entries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def behave(body: object) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        bench = Bench(tmp_path)
        bench.handler.behave = behave
        async with bench.running() as runner:
            batch = await ended(runner, await submit(runner, input_file(100)))
            assert (batch.completed, batch.failed) == (0, 100)
        assert bench.handler.calls.total() == 300

    asyncio.run(main())
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2
