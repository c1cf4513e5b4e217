"""The engine process is killed, stopped and continued under load: nothing hangs, nothing is lost, no text changes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx2
import openai
import psutil
import pytest

from jaxserve import launch_server
from jaxserve.serving import RunningServer
from tests.conftest import SMALL

QUESTIONS = [
    "What is the capital of France?",
    "Tell me a short story about a cat.",
    "What is the opposite of hot?",
    "List 3 countries and their capitals.",
]


@pytest.fixture(scope="module")
def server(compile_cache: str) -> Iterator[RunningServer]:
    with launch_server(compile_cache=compile_cache, watchdog_timeout=8.0, **SMALL) as running:
        yield running


def engine_process() -> psutil.Process:
    """The engine of this module's server: the newest that this process started."""
    found = [p for p in psutil.Process().children() if "jaxserve.engine.process" in " ".join(p.cmdline())]
    return max(found, key=lambda process: process.create_time())


def status(server: RunningServer) -> int:
    return httpx2.get(f"{server.url}/health", timeout=5).status_code


def wait_for(server: RunningServer, code: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while status(server) != code:
        assert time.monotonic() < deadline, f"/health is not {code} after {seconds} s"
        time.sleep(0.05)


async def ask(client: openai.AsyncOpenAI, index: int, *, stream: bool) -> str:
    messages = [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]
    arguments = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 100, "seed": index}
    if not stream:
        reply = await client.chat.completions.create(**arguments)  # type: ignore[call-overload]
        return reply.choices[0].message.content
    text = ""
    async for chunk in await client.chat.completions.create(stream=True, **arguments):  # type: ignore[call-overload]
        text += chunk.choices[0].delta.content or ""
    return text


async def mixed(server: RunningServer, count: int, *, fault: float | None) -> list[str]:
    """Texts of `count` requests, half of them streams; the engine is killed after `fault` seconds."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=90) as client:
        tasks = [asyncio.create_task(ask(client, i, stream=i % 2 == 0)) for i in range(count)]
        if fault is not None:
            await asyncio.sleep(fault)
            engine_process().kill()
        return list(await asyncio.gather(*tasks))


@pytest.mark.parametrize("delay", [0.05, 0.4])
def test_a_killed_engine_loses_nothing(server: RunningServer, delay: float) -> None:
    expected = asyncio.run(mixed(server, 4, fault=None))
    texts = asyncio.run(mixed(server, 64, fault=delay))
    assert texts == [expected[i % 4] for i in range(64)]
    wait_for(server, 200, 30)
    assert asyncio.run(mixed(server, 8, fault=None)) == expected * 2


def test_health_tells_of_the_death_at_once(server: RunningServer) -> None:
    wait_for(server, 200, 30)
    engine_process().kill()
    wait_for(server, 503, 1.0)
    reply = httpx2.post(f"{server.url}/v1/completions", json={"model": "demo", "prompt": "a"})
    assert reply.status_code == 503
    assert reply.headers["Retry-After"]
    wait_for(server, 200, 30)


def test_a_stopped_engine_that_goes_on_in_time_loses_nothing(server: RunningServer) -> None:
    expected = asyncio.run(mixed(server, 4, fault=None))
    engine = engine_process()

    async def run() -> list[str]:
        work = asyncio.create_task(mixed(server, 8, fault=None))
        await asyncio.sleep(0.1)
        engine.suspend()
        await asyncio.sleep(4.5)
        seen = await asyncio.to_thread(status, server)
        engine.resume()
        assert seen == 503
        return await work

    assert asyncio.run(run()) == expected * 2
    assert engine_process().pid == engine.pid


def test_a_stuck_engine_is_replaced_by_the_watchdog(server: RunningServer) -> None:
    engine = engine_process()
    engine.suspend()
    wait_for(server, 503, 5)
    deadline = time.monotonic() + 20
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    wait_for(server, 200, 30)


def test_no_engine_outlives_its_server(compile_cache: str) -> None:
    environment = os.environ | {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache}
    command = [sys.executable, "-m", "jaxserve", "launch", "--port", "0"]
    for key, value in SMALL.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launched:
        assert launched.stdout is not None
        assert launched.stdout.readline().startswith("jaxserve is ready")
        children = psutil.Process(launched.pid).children(recursive=True)
        assert children
        os.kill(launched.pid, signal.SIGKILL)
        _, left = psutil.wait_procs(children, timeout=5)
        assert left == []
