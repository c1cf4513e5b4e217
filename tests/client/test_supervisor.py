"""The engine's life: restarts in a row, what the status says while the server drains, and how an end is explained."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.processes import supervisor
from jaxserve.client.processes.supervisor import RESTART_DELAYS, STABLE_AFTER, Restarts
from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError, NotReadyError
from jaxserve.types.messages import Failed, Progress
from jaxserve.types.output import FinishReason
from jaxserve.types.sampling import SamplingParams
from tests.client.test_async_engine import HandLink, until


def test_restarts_in_a_row_are_delayed_and_then_end() -> None:
    row = Restarts()
    assert tuple(row.next_delay("counted", 1.0) for _ in RESTART_DELAYS) == RESTART_DELAYS
    assert row.next_delay("counted", 1.0) is None


def test_long_service_forgets_the_row() -> None:
    row = Restarts()
    for _ in range(20):
        assert row.next_delay("counted", STABLE_AFTER + 1) == 0.0


def test_deaths_of_a_search_do_not_count_and_its_success_forgets_the_row() -> None:
    row = Restarts()
    for _ in range(20):
        assert [row.next_delay("counted", 1.0) for _ in range(3)] == [0.0, 0.5, 2.0]
        assert [row.next_delay("search", 1.0) for _ in range(10)] == [0.0] * 10
        assert row.next_delay("solved", 1.0) == 0.0


def with_engine(work: Callable[[AsyncEngine, HandLink], Awaitable[None]]) -> None:
    async def run() -> None:
        link = HandLink()
        engine = AsyncEngine(Config(), link)
        await engine.start()
        await work(engine, link)
        await engine.stop()

    asyncio.run(run())


def test_a_drain_outlasts_the_death_of_the_engine() -> None:
    async def work(engine: AsyncEngine, link: HandLink) -> None:
        engine.drain()
        seen = {engine.status.phase}
        link.die()
        while engine.restarts == 0 or engine.status.detail:
            link.messages.put_nowait(Progress("programs", 1, 2, "programs"))
            seen.add((await engine.next_status()).phase)
        assert seen == {"draining"}
        with pytest.raises(NotReadyError, match="draining"):
            engine.check_ready()

    with_engine(work)


@pytest.mark.parametrize("error", [OSError("no more processes"), ConfigError("the temporary folder is full")])
def test_a_start_that_fails_after_a_death_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What the system refuses now it may give later. The first start ends the server with the reason."""
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0, 0.0, 0.0))

    async def work(engine: AsyncEngine, link: HandLink) -> None:
        start, failures = link.start, [error, error]

        async def refused() -> None:
            if failures:
                raise failures.pop()
            await start()

        monkeypatch.setattr(link, "start", refused)
        task = asyncio.create_task(_tokens(engine))
        await until(lambda: link.requests)
        link.die()
        await until(lambda: len(link.requests) == 2)
        link.give(link.requests[-1].request_id, 5, FinishReason.STOP)
        assert await task == [5] and engine.restarts == 3 and engine.failure is None

    with_engine(work)


async def _tokens(engine: AsyncEngine) -> list[int]:
    return [token async for output in engine.generate([1, 2], SamplingParams()) for token in output.token_ids]


def test_the_last_word_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of an engine that had been ready, which is no mistake of the operator."""
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0, 0.0))

    async def work(engine: AsyncEngine, link: HandLink) -> None:
        for death in range(3):
            while engine.restarts < death or engine.status.phase != "ready":
                await engine.next_status()
            link.messages.put_nowait(Failed("no memory on the device", expected=False))
            link.die()
        while engine.status.phase != "dead":
            await engine.next_status()
        assert engine.status.detail == "killed by the test: no memory on the device, after 2 restarts in a row"
        assert engine.failure is None
        with pytest.raises(EngineDeadError, match="no memory"):
            engine.check_ready()

    with_engine(work)
