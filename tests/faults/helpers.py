"""What fault tests share: golden questions, mixed load from one seed, and a server's state as an operator sees it."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

import httpx2
import numpy as np
import openai
import psutil
from safetensors.numpy import load_file

from jaxserve.library.serving import RunningServer
from tests.api.fakes import DEMO
from tests.scrape import values
from tests.waiting import LAST_RESORT, wait_until

QUESTIONS = [
    "What is the capital of France?",
    "Tell me a short story about a cat.",
    "What is the opposite of hot?",
    "List 3 countries and their capitals.",
    "What is the capital of Japan?",
    "Tell me a short story about a dog.",
    "What is the opposite of big?",
    "Count from 1 to 10.",
    "What is 2 plus 3?",
    "Hello!",
    "What color is the sky?",
    "What is the capital of Italy?",
    "Tell me a short story about a bird.",
    "What is the opposite of old?",
    "How many legs does a spider have?",
    "What is the capital of Spain?",
    "Who are you?",
    "What day comes after Monday?",
    "List 5 animals.",
    "What is 7 times 6?",
]


async def ask(
    client: openai.AsyncOpenAI, index: int, *, stream: bool, begun: set[int] | None = None, **fields: Any
) -> str:
    """The greedy answer to question `index`. Raises what the client raises; an error event of a stream too.

    begun: gets `index` when a stream has brought text.
    """
    messages = [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]
    arguments = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 100, "extra_body": fields}
    if not stream:
        reply = await client.chat.completions.create(**arguments)  # type: ignore[call-overload]
        return reply.choices[0].message.content
    text = ""
    async for chunk in await client.chat.completions.create(stream=True, **arguments):  # type: ignore[call-overload]
        text += chunk.choices[0].delta.content or ""
        if text and begun is not None:
            begun.add(index)
    return text


def client_of(server: RunningServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=LAST_RESORT)


async def ask_all(
    server: RunningServer, count: int = len(QUESTIONS), first_id: str | None = None, *, first_may_fail: bool = False
) -> list[str]:
    """The answers to `count` questions asked at once, half of them as streams.

    first_id: of the first request. first_may_fail: its answer is then the message of its error.
    """

    async def answer(index: int) -> str:
        named: dict[str, Any] = {} if first_id is None or index else {"request_id": first_id}
        # On a slow machine one may come while the engine restarts: it is refused with Retry-After and asks again.
        patient = client.with_options(max_retries=0 if first_may_fail and not index else 8)
        try:
            return await ask(patient, index, stream=index % 2 == 0, **named)
        except openai.APIError as error:
            if index or not first_may_fail:
                raise
            return error.message

    async with client_of(server) as client:
        return list(await asyncio.gather(*(answer(index) for index in range(count))))


@functools.cache
def golden(server: RunningServer) -> list[str]:
    """What this server answers to the questions one after the other with nothing going wrong."""

    async def one_by_one() -> list[str]:
        async with client_of(server) as client:
            return [await ask(client, i, stream=False) for i in range(len(QUESTIONS))]

    return asyncio.run(one_by_one())


def check_goldens(server: RunningServer) -> None:
    assert asyncio.run(ask_all(server)) == golden(server)


def engine_process() -> psutil.Process:
    """The engine of this process's newest server."""
    found = [p for p in psutil.Process().children() if p.is_running() and is_engine(p)]
    return max(found, key=lambda process: process.create_time())


def is_engine(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return "jaxserve.engine.process" in command or "tests.faults.engine" in command


def status(server: RunningServer) -> int:
    return httpx2.get(f"{server.url}/health", timeout=LAST_RESORT).status_code


def wait_for(server: RunningServer, code: int) -> float:
    """Wait until /health answers with `code`; seconds that it took."""
    started = time.monotonic()
    wait_until(lambda: status(server) == code, f"/health is {code}")
    return time.monotonic() - started


def stats(server: RunningServer) -> dict[str, float]:
    """Values of /metrics by name."""
    return values(httpx2.get(f"{server.url}/metrics", timeout=LAST_RESORT).text)


def tensors(seed: int) -> dict[str, np.ndarray]:
    """Other weights of the demo model."""
    rng, found = np.random.default_rng(seed), load_file(DEMO / "model.safetensors")
    return {
        name: (array.astype(np.float32) * (1 + 0.2 * rng.normal(size=array.shape))).astype(array.dtype)
        for name, array in found.items()
    }
