"""How long a batch waits for the store, what it says meanwhile, and how often."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from jaxserve.api.batch import job as module
from jaxserve.api.batch.job import MAX_FACTOR, StoragePause
from jaxserve.errors import DiskFullError, StorageError

FULL = DiskFullError("The server's disk is full.")


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays that pauses ask for. Only the module's name is replaced: servers in other threads sleep too."""
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    return asked


def wait(pause: StoragePause, *errors: StorageError) -> None:
    async def main() -> None:
        for error in errors:
            await pause.wait(error)

    asyncio.run(main())


def test_delays_double_up_to_a_limit_and_differ(delays: list[float]) -> None:
    pause = StoragePause("batch batch_1", 2.0)
    wait(pause, *[FULL] * 40)
    for attempt, delay in enumerate(delays):
        longest = 2.0 * min(2**attempt, MAX_FACTOR)
        assert longest / 2 <= delay <= longest
    assert len(set(delays[-30:])) > 20
    pause.end()
    wait(pause, FULL)
    assert delays[-1] <= 2.0


def test_one_line_when_it_begins_and_one_when_it_ends(delays: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pause = StoragePause("batch batch_1", 1.0)
    pause.end()
    for _ in range(2):
        wait(pause, FULL, FULL, StorageError("The server's store cannot be written: Input/output error."), FULL)
        pause.end()
        pause.end()
    assert caplog.messages == ["batch batch_1 waits: The server's disk is full.", "batch batch_1 goes on"] * 2


def test_what_clients_see(delays: list[float]) -> None:
    pause = StoragePause("batch batch_1", 1.0)
    assert pause.error is None
    wait(pause, FULL)
    assert pause.error is not None
    assert (pause.error.code, pause.error.line) == ("waiting_for_storage", None)
    assert pause.error.message.startswith(FULL.message)
    pause.end()
    assert pause.error is None
