"""Real engine processes that are stopped or merely not looked at are not killed. Stuck ones: test_engine_death.py."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from jaxserve.client import link as link_module
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import ProcessLink
from jaxserve.config import Config
from jaxserve.types.sampling import SamplingParams

LIMIT = 1.5  # seconds
CONFIG = Config().replace(server={"watchdog_timeout": LIMIT})
FAKE = "tests.faults.fake_engine"


def with_engine(work: Callable[[AsyncEngine, ProcessLink], Awaitable[None]]) -> None:
    async def run() -> None:
        link = ProcessLink(CONFIG, module=FAKE)
        engine = AsyncEngine(CONFIG, link)
        await engine.start()
        try:
            await work(engine, link)
        finally:
            await engine.stop()

    asyncio.run(run())


async def answer(engine: AsyncEngine) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0)):
        tokens += output.token_ids
    return tokens


def process_of(link: ProcessLink) -> psutil.Process:
    assert link.pid is not None
    return psutil.Process(link.pid)


def test_a_busy_event_loop_kills_no_engine() -> None:
    """For longer than the limit, again and again."""

    async def work(engine: AsyncEngine, link: ProcessLink) -> None:
        expected, pid = await answer(engine), link.pid
        for _ in range(2):
            time.sleep(LIMIT + 0.3)
            await asyncio.sleep(0.1)
        assert engine.restarts == 0 and link.pid == pid and engine.alive
        assert await answer(engine) == expected

    with_engine(work)


def test_a_pause_of_all_processes_kills_nobody(tmp_path: Path) -> None:
    """As of a stopped container: the API process and its engine are stopped for longer than the limit."""
    command = [sys.executable, "-m", "tests.faults.test_watchdog"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        engine = psutil.Process(int(process.stdout.readline()))
        for _ in range(2):
            engine.suspend()
            process.send_signal(signal.SIGSTOP)
            time.sleep(LIMIT + 0.5)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.2)  # the API process looks before its engine goes on
            engine.resume()
            time.sleep(0.5)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"restarts 0, engine {engine.pid}, 20 tokens\n"
        process.stdin.close()
        assert process.wait(30) == 0


async def paused() -> None:
    """The API process of the test above."""
    link = ProcessLink(CONFIG, module=FAKE)
    engine = AsyncEngine(CONFIG, link)
    await engine.start()
    print(link.pid, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    tokens = await answer(engine)
    print(f"restarts {engine.restarts}, engine {link.pid}, {len(tokens)} tokens", flush=True)
    await engine.stop()


def test_an_engine_that_loads_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would not read the message that asks it to end."""
    monkeypatch.setattr(link_module, "STOP_TIMEOUT", 3600.0)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    (tmp_path / "never_ready.py").write_text("import time\ntime.sleep(3600)\n")

    async def run() -> None:
        child = ProcessLink(CONFIG, module="never_ready")
        await child.start()
        process = process_of(child)
        await asyncio.wait_for(child.stop(), 60)
        assert not process.is_running()

    asyncio.run(run())


if __name__ == "__main__":
    asyncio.run(paused())
