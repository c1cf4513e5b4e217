"""The engine's life: restarts in a row, what the status says while the server drains, and how an end is explained."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jaxserve.client import supervisor
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.supervisor import RESTART_DELAYS, STABLE_AFTER, Restarts, Supervisor
from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError, NotReadyError
from jaxserve.transport.shared_state import Pulse
from jaxserve.types.messages import Failed, Progress
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason
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


class FailingLink(HandLink):
    """The first start fails with this message."""

    def __init__(self, failed: Failed) -> None:
        super().__init__()
        self._failed = failed

    async def start(self) -> None:
        self.messages.put_nowait(self._failed)
        self.die()


@pytest.mark.parametrize(
    ("failed", "error"),
    [
        (Failed("no such file", "name another"), ConfigError),
        (Failed("host 1 is lost", expected=False), EngineDeadError),
    ],
)
def test_only_an_operators_mistake_ends_a_first_start_as_one(failed: Failed, error: type[Exception]) -> None:
    """Exit code 2 is for mistakes: what starts servers again, as systemd does, does not after it."""

    async def run() -> None:
        engine = AsyncEngine(Config(), FailingLink(failed))
        with pytest.raises(error, match=failed.message):
            await engine.start()
        assert (engine.failure is None) == (error is EngineDeadError)
        await engine.stop()

    asyncio.run(run())


class StuckLink(HandLink):
    """The first engine is stuck, and dies by itself while its stacks are written. Those after it are not stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = self.kills = 0
        self.has_died = False

    def pulse(self) -> Pulse:  # type: ignore[override]
        self.looks += 1
        return Pulse(self.looks, self.looks if self.has_died else 0)

    def dump_stacks(self) -> None:
        self.has_died = True
        self.die()

    def kill(self) -> None:
        self.kills += 1


def test_the_watchdog_does_not_kill_the_engine_after_the_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOOK_INTERVAL", 0.02)
    monkeypatch.setattr(supervisor, "DUMP_TIME", 0.1)

    async def run() -> None:
        link = StuckLink()
        watched = Supervisor(
            link,
            watchdog=0.2,
            on_message=lambda message: None,
            on_ready=lambda info: None,
            on_death=lambda error: "counted",
            on_end=lambda error: None,
        )
        watched.start()
        await until(lambda: watched.restarts and watched.status.phase == "ready")
        looks = link.looks
        await until(lambda: link.looks > looks + 2)  # the watchdog goes on after the time for the stacks
        assert link.kills == 0 and watched.restarts == 1
        await watched.stop()

    asyncio.run(run())


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
