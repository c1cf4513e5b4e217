"""The engine process is killed, stopped and continued under load: nothing hangs, nothing is lost, no text changes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import psutil
import pytest

from jaxserve import launch_server
from jaxserve.library.serving import RunningServer
from tests.conftest import SERVED
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
from tests.waiting import LAST_RESORT, until, wait_until

WATCHDOG = 12.0  # seconds


@pytest.fixture(scope="module")
def server(compile_cache: str) -> Iterator[RunningServer]:
    with launch_server(compile_cache=compile_cache, watchdog_timeout=WATCHDOG, **SERVED) as running:
        yield running


def num_engines() -> int:
    """Of this process: other tests' servers may live on beside this one."""
    return sum(is_engine(process) for process in psutil.Process().children(recursive=True))


async def ask_in_responses(client: openai.AsyncOpenAI, index: int, *, stream: bool, begun: set[int]) -> str:
    """As `ask`, of the route of Responses. The numbers of a stream's events have no gap and no repetition."""
    question = QUESTIONS[index % len(QUESTIONS)]
    arguments: dict[str, Any] = {"input": question, "temperature": 0, "max_output_tokens": 100}
    if not stream:
        return (await client.responses.create(**arguments)).output_text
    numbers, text = [], ""
    async with client.responses.with_streaming_response.create(stream=True, **arguments) as response:
        async for line in response.iter_lines():  # the SDK's models of events take longer than the events
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                numbers.append(event["sequence_number"])
                text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            if text:
                begun.add(index)
    assert numbers == list(range(len(numbers)))
    return text


async def ask_in_messages(client: openai.AsyncOpenAI, index: int, *, stream: bool, begun: set[int]) -> str:
    """As `ask`, of the route of Messages. A stream begins and ends once, and its blocks have no gap."""
    messages = [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 100, "stream": stream}
    kinds, text = [], ""
    async with httpx2.AsyncClient(base_url=f"{client.base_url}", timeout=LAST_RESORT) as http:
        if not stream:
            return (await http.post("messages", json=body)).json()["content"][0]["text"]
        async with http.stream("POST", "messages", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    kinds.append(event["type"])
                    text += event["delta"]["text"] if event["type"] == "content_block_delta" else ""
                if text:
                    begun.add(index)
    told = [kind for kind in kinds if kind not in ("content_block_delta", "ping")]
    assert told == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    return text


async def seen_death(server: RunningServer, restarts: int) -> None:
    """Return once the engine has been started again after `restarts` times."""
    await until(lambda: server.launch.engine.restarts > restarts, "the death is seen")


async def killed_under_load(server: RunningServer, count: int, streaming: int, ask: Any = ask) -> list[str]:
    """Answers of `count` requests, half of them streams. The engine is killed when all were accepted and have either
    ended or are live, and `streaming` streams have brought text and not ended."""
    async with client_of(server) as client:
        for _ in range(10):
            begun: set[int] = set()
            tasks = [asyncio.create_task(ask(client, i, stream=i % 2 == 0, begun=begun)) for i in range(count)]
            while server.launch.engine.num_live + sum(task.done() for task in tasks) < count:
                await asyncio.sleep(0.01)
            while sum(not tasks[i].done() for i in begun) < streaming and not all(task.done() for task in tasks):
                await asyncio.sleep(0.002)
            if sum(not tasks[i].done() for i in begun) >= streaming:
                seen = seen_death(server, server.launch.engine.restarts)
                engine_process().kill()
                texts = await asyncio.gather(*tasks)
                await seen
                return list(texts)
            await asyncio.gather(*tasks)
    raise AssertionError("the requests were too quick to be killed in the middle")


@pytest.mark.parametrize("streaming", [pytest.param(0, marks=pytest.mark.slow), 12])
def test_a_killed_engine_loses_nothing(server: RunningServer, streaming: int) -> None:
    """Each of 64 gets its golden text, those that had begun to stream too; then 20 goldens of the new engine."""
    expected, engines = golden(server), num_engines()
    texts = asyncio.run(killed_under_load(server, 64, streaming))
    assert texts == [expected[i % len(QUESTIONS)] for i in range(64)]
    wait_for(server, 200)
    check_goldens(server)
    assert num_engines() == engines


@pytest.mark.parametrize("ask", [ask_in_responses, ask_in_messages])
def test_a_killed_engine_loses_no_answer_of_agents(server: RunningServer, ask: Any) -> None:
    expected = golden(server)  # before the kill: a server that restarts refuses new requests
    texts = asyncio.run(killed_under_load(server, 64, 6, ask))
    assert texts == [expected[i % len(QUESTIONS)] for i in range(64)]
    wait_for(server, 200)


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
