"""Engines of which some only compute prompts, and which are really killed, with requests in every phase."""

import asyncio
import os
import signal
from pathlib import Path

import httpx2
import psutil
import pytest

from jaxserve import launch_server
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import ProcessLink
from jaxserve.config import Config
from jaxserve.transport import socket_directory
from jaxserve.types.sampling import SamplingParams
from tests.conftest import SMALL
from tests.fakes import alone
from tests.faults.fake_engine import MARKS
from tests.faults.helpers import ask_all, golden, is_engine
from tests.scrape import values
from tests.waiting import LAST_RESORT, until, wait_until

PARAMS = SamplingParams(max_tokens=100, temperature=0.0)
PROMPTS = [[number, *(7 * i % 90 for i in range(300 + number))] for number in range(1, 49)]
assert not {prompt[0] for prompt in PROMPTS} & {*MARKS}


@pytest.mark.parametrize("victim", [0, 1])
def test_an_engine_of_either_role_is_killed(victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill engine and two decode engines; one is killed while each phase has requests. No token changes."""
    monkeypatch.setattr(socket_directory, "SHARED_MEMORY", tmp_path)
    config = Config().replace(mesh={"replicas": 3, "prefill_replicas": 1, "prefill_min_tokens": 8})

    async def answer(engine: AsyncEngine, number: int) -> list[int]:
        return [token async for output in engine.generate(PROMPTS[number], PARAMS) for token in output.token_ids]

    async def run() -> None:
        links = [ProcessLink(config, module="tests.faults.fake_engine") for _ in range(3)]
        engine = AsyncEngine(config, links)
        await engine.start()
        try:
            asked = [asyncio.create_task(answer(engine, number)) for number in range(len(PROMPTS))]
            await until(lambda: all(state.num_live > 1 for state in engine.replicas), "requests are in every phase")
            pid = links[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*asked) == [alone(prompt, PARAMS)[0] for prompt in PROMPTS]
            await until(lambda: all(state.alive for state in engine.replicas), "it is back")
            assert engine.restarts == 1 and engine.num_live == 0
            assert engine.replicas[2].stats.details["pages_read"] > 0
            before = engine.replicas[0].stats.computed_prompt_tokens
            again = [90, *PROMPTS[0]]
            found = [token async for output in engine.generate(again, PARAMS) for token in output.token_ids]
            assert found == alone(again, PARAMS)[0]
            await until(lambda: engine.replicas[0].stats.computed_prompt_tokens > before, "it computes prompts")
        finally:
            await engine.stop()

    asyncio.run(run())
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_server_outlives_each_of_its_engines(compile_cache: str) -> None:
    """The demo model over HTTP, half of the answers as streams. The text is that of a server whose engines live."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a core for each engine")
    keys = {"replicas": 2, "prefill_replicas": 1, "prefill_min_tokens": 1}
    with launch_server(compile_cache=compile_cache, **keys, **SMALL) as server:

        def states() -> list[dict[str, object]]:
            return httpx2.get(f"{server.url}/server_info", timeout=LAST_RESORT).json()["engines"]

        expected = golden(server)
        for role in (0, 1):
            engines = [process for process in psutil.Process().children() if is_engine(process)]
            engines.sort(key=lambda process: sorted(process.cpu_affinity()))

            async def kill_among_them(victim: psutil.Process, role: int) -> list[str]:
                answers = asyncio.create_task(ask_all(server))
                while not (await asyncio.to_thread(states))[role]["num_live"]:
                    await asyncio.sleep(0.005)
                victim.kill()
                return await answers

            assert asyncio.run(kill_among_them(engines[role], role)) == expected
            wait_until(lambda: all(state["alive"] for state in states()), "both serve again")
        health = httpx2.get(f"{server.url}/health", timeout=LAST_RESORT).json()
        assert [each["role"] for each in health["engines"]] == ["prefill", "decode"]
        metrics = values(httpx2.get(f"{server.url}/metrics", timeout=LAST_RESORT).text)
        assert metrics['jaxserve:engine_role{engine="1",role="decode"}'] == 1
        assert asyncio.run(ask_all(server)) == expected
