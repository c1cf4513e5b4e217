"""Several engine processes, of which some are really killed: nothing is lost, no token changes.

Most tests use the engine of fake_engine.py, whose tokens are known without it, and which starts in a second.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import httpx2
import psutil
import pytest

from jaxserve import launch_server
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import ProcessLink
from jaxserve.config import Config
from jaxserve.errors import ServerError
from jaxserve.types.sampling import SamplingParams
from tests.conftest import SERVED
from tests.fakes import alone
from tests.faults.fake_engine import SEGFAULT
from tests.faults.helpers import ask_all, golden, is_engine
from tests.faults.test_poison import INNOCENT, PARAMS, answer
from tests.scrape import values
from tests.waiting import LAST_RESORT, until, wait_until

Work = Callable[[AsyncEngine, list[ProcessLink]], Awaitable[None]]


def with_engines(count: int, work: Work) -> None:
    config = Config().replace(mesh={"replicas": count})

    async def run() -> None:
        links = [ProcessLink(config, module="tests.faults.fake_engine") for _ in range(count)]
        engine = AsyncEngine(config, links)
        await engine.start()
        try:
            await work(engine, links)
        finally:
            await engine.stop()

    asyncio.run(run())


def expected(prompts: list[list[int]]) -> list[list[list[int]]]:
    return [[alone(prompt, PARAMS)[0]] for prompt in prompts]


def test_a_killed_engine_loses_nothing_and_the_streams_go_on_in_the_other() -> None:
    async def work(engine: AsyncEngine, links: list[ProcessLink]) -> None:
        begun = [0] * len(INNOCENT)

        async def read(index: int) -> list[list[int]]:
            tokens: list[int] = []
            async for output in engine.generate(INNOCENT[index], PARAMS):
                tokens += output.token_ids
                begun[index] = len(tokens)
            return [tokens]

        streams = [asyncio.create_task(read(index)) for index in range(len(INNOCENT))]
        await until(lambda: min(begun) > 5, "all streams have begun")
        assert [state.num_live for state in engine.replicas] == [8, 8]
        assert links[0].pid is not None
        os.kill(links[0].pid, signal.SIGKILL)
        await until(lambda: engine.restarts, "the death was seen")
        assert engine.alive and engine.status.phase == "ready"
        assert [state.num_live for state in engine.replicas] == [0, len([n for n in begun if n < 100])]
        assert await asyncio.gather(*streams) == expected(INNOCENT)
        await until(lambda: all(state.alive for state in engine.replicas), "the first engine is back")
        assert await answer(engine, [1, 2, 3]) == expected([[1, 2, 3]])[0]

    with_engines(2, work)


def test_a_request_that_kills_engines_leaves_one_of_three_alone() -> None:
    async def work(engine: AsyncEngine, links: list[ProcessLink]) -> None:
        streams = [asyncio.create_task(answer(engine, prompt)) for prompt in INNOCENT]
        with pytest.raises(ServerError, match="died each time"):
            await answer(engine, [SEGFAULT, 5])
        assert await asyncio.gather(*streams) == expected(INNOCENT)
        restarts = sorted(state.restarts for state in engine.replicas)
        assert restarts[0] == 0 and sum(restarts) <= 4
        assert await answer(engine, [1, 2, 3]) == expected([[1, 2, 3]])[0]

    with_engines(3, work)


def test_choices_and_seeds_are_the_same_on_every_engine() -> None:
    async def work(engine: AsyncEngine, links: list[ProcessLink]) -> None:
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=2)
        found = []
        for replica in (0, 1, None):
            tokens: list[list[int]] = [[], []]
            async for output in engine.generate([3, 1, 4], params, replica=replica):
                tokens[output.index] += output.token_ids
            found.append(tokens)
        assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]

    with_engines(2, work)


def test_a_server_of_two_engines_outlives_one_of_them(compile_cache: str) -> None:
    """The demo model over HTTP: half of the answers are streams, and one engine is killed among them."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a core for each engine")
    with launch_server(compile_cache=compile_cache, replicas=2, **SERVED) as server:
        engines = [process for process in psutil.Process().children() if is_engine(process)][-2:]
        cores = [set(process.cpu_affinity()) for process in engines]
        assert not cores[0] & cores[1]

        def states() -> list[dict[str, object]]:
            return httpx2.get(f"{server.url}/server_info", timeout=LAST_RESORT).json()["engines"]

        async def kill_among_them() -> list[str]:
            answers = asyncio.create_task(ask_all(server))
            while not all(state["num_live"] for state in await asyncio.to_thread(states)):
                await asyncio.sleep(0.01)
            engines[0].kill()
            return await answers

        assert asyncio.run(kill_among_them()) == golden(server)
        assert sum(int(str(state["restarts"])) for state in states()) == 1
        wait_until(lambda: all(state["alive"] for state in states()), "both serve again")
        health = httpx2.get(f"{server.url}/health", timeout=LAST_RESORT)
        assert health.status_code == 200 and [each["status"] for each in health.json()["engines"]] == ["ready"] * 2
        metrics = values(httpx2.get(f"{server.url}/metrics", timeout=LAST_RESORT).text)
        assert metrics['jaxserve:engine_alive{engine="1"}'] == 1
        assert asyncio.run(ask_all(server)) == golden(server)
