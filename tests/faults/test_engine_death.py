"""The engine process is killed, stopped and continued under load: nothing hangs, nothing is lost, no text changes."""

import asyncio
from collections.abc import Iterator

import httpx2
import psutil
import pytest

from jaxserve import launch_server
from jaxserve.library.serving import RunningServer
from tests.conftest import SMALL
from tests.faults.helpers import (
    QUESTIONS,
    ask,
    ask_all,
    check_goldens,
    client_of,
    engine_process,
    golden,
    is_engine,
    wait_for,
)
from tests.waiting import until, wait_until

WATCHDOG = 12.0  # seconds


@pytest.fixture(scope="module")
def server(compile_cache: str) -> Iterator[RunningServer]:
    with launch_server(compile_cache=compile_cache, watchdog_timeout=WATCHDOG, **SMALL) as running:
        yield running


def num_engines() -> int:
    """Of this process: other tests' servers may live on beside this one."""
    return sum(is_engine(process) for process in psutil.Process().children(recursive=True))


async def killed_under_load(server: RunningServer, count: int, streaming: int) -> list[str]:
    """Answers of `count` requests, half of them streams. The engine is killed when all were accepted and have either
    ended or are live, and `streaming` streams have brought text and not ended."""
    async with client_of(server) as client:
        begun: set[int] = set()
        tasks = [asyncio.create_task(ask(client, i, stream=i % 2 == 0, begun=begun)) for i in range(count)]
        while server.launch.engine.num_live + sum(task.done() for task in tasks) < count:
            await asyncio.sleep(0.01)
        while sum(not tasks[i].done() for i in begun) < streaming:
            assert not all(task.done() for task in tasks), "too quick to be killed in the middle"
            await asyncio.sleep(0.002)
        engine_process().kill()
        return list(await asyncio.gather(*tasks))


@pytest.mark.parametrize("streaming", [0, 12])
def test_a_killed_engine_loses_nothing(server: RunningServer, streaming: int) -> None:
    """Each of 64 gets its golden text, those that had begun to stream too; then 20 goldens of the new engine."""
    expected, engines = golden(server), num_engines()
    texts = asyncio.run(killed_under_load(server, 64, streaming))
    assert texts == [expected[i % len(QUESTIONS)] for i in range(64)]
    wait_for(server, 200)
    check_goldens(server)
    assert num_engines() == engines


def test_health_tells_of_the_death_at_once(server: RunningServer) -> None:
    wait_for(server, 200)
    engine_process().kill()
    assert wait_for(server, 503) < WATCHDOG / 2  # it is the process's end that is noticed, not its silence
    reply = httpx2.post(f"{server.url}/v1/completions", json={"model": "demo", "prompt": "a"})
    assert reply.status_code == 503
    assert reply.headers["Retry-After"]
    wait_for(server, 200)


def test_a_stopped_engine_that_goes_on_in_time_loses_nothing(server: RunningServer) -> None:
    expected = golden(server)
    engine = engine_process()

    async def run() -> list[str]:
        work = asyncio.create_task(ask_all(server))
        await until(lambda: server.launch.engine.num_live, "requests are live")
        engine.suspend()
        await asyncio.to_thread(wait_for, server, 503)
        engine.resume()
        return await work

    assert asyncio.run(run()) == expected
    assert engine_process().pid == engine.pid


def test_a_stuck_engine_is_replaced_by_the_watchdog(server: RunningServer) -> None:
    engine = engine_process()
    engine.suspend()
    wait_for(server, 503)
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, "the engine is killed")
    wait_for(server, 200)
