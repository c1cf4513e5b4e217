"""No prompt length, no concurrency is refused by its shape or compiles a program once the server is ready."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import httpx2
import pytest

from jaxserve.library.serving import RunningServer
from tests.conftest import SMALL
from tests.scrape import values
from tests.waiting import LAST_RESORT, until

CONTEXT = 2048  # tokens, of the demo model
POWERS = [2**i for i in range(1, 11)]
LENGTHS = sorted(
    {1, CONTEXT - 1, CONTEXT - 2} | {n + d for n in POWERS for d in (-1, 0, 1)} | set(range(97, CONTEXT, 97))
)


def metrics(server: RunningServer) -> dict[str, float]:
    """Gauges and counters without labels."""
    return values(httpx2.get(f"{server.url}/metrics", timeout=LAST_RESORT).text)


async def settled(server: RunningServer) -> dict[str, float]:
    def idle() -> dict[str, float]:
        now = metrics(server)
        return {} if now["jaxserve:num_requests_running"] or now["jaxserve:num_requests_waiting"] else now

    return await until(idle, "the server is idle")


def pages_of(now: dict[str, float]) -> float:
    """Pages that no request holds: free ones and those that only the prefix cache keeps."""
    return now["jaxserve:pages_free"] + now["jaxserve:pages_cached"]


def run(server: RunningServer, work: Coroutine[Any, Any, None]) -> None:
    async def check() -> None:
        before = await settled(server)
        await work
        after = await settled(server)
        assert pages_of(after) == pages_of(before) == before["jaxserve:pages_total"]
        assert after["jaxserve:num_requests_running"] == after["jaxserve:num_requests_waiting"] == 0
        assert after["jaxserve:xla_compilations_total"] == 0

    asyncio.run(check())


async def complete(client: httpx2.AsyncClient, prompt: list[int], max_tokens: int) -> int:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["completion_tokens"])


def test_every_prompt_length(server: RunningServer) -> None:
    rng = random.Random(1)

    async def work() -> None:
        async with httpx2.AsyncClient(base_url=server.url, timeout=120) as client:
            for length in LENGTHS:
                prompt = [rng.randrange(300, 2000) for _ in range(length)]
                wanted = min(2, CONTEXT - length)
                assert await complete(client, prompt, wanted) == wanted

    run(server, work())


def test_every_concurrency(server: RunningServer) -> None:
    rng = random.Random(2)

    async def work() -> None:
        async with httpx2.AsyncClient(
            base_url=server.url, timeout=120, limits=httpx2.Limits(max_connections=None)
        ) as client:
            for count in range(1, SMALL["max_num_seqs"] + 9, 3):
                prompts = [[rng.randrange(300, 2000) for _ in range(rng.randrange(1, 40))] for _ in range(count)]
                assert await asyncio.gather(*(complete(client, p, 4) for p in prompts)) == [4] * count

    run(server, work())


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"regex": "[ab]{3,5}"}, {"frequency_penalty": 1.0}])
def test_every_variant_in_one_batch(server: RunningServer, extra: dict[str, Any]) -> None:
    async def one(client: httpx2.AsyncClient, body: dict[str, Any]) -> None:
        reply = await client.post("/v1/completions", json={"model": "demo", "prompt": "One", "max_tokens": 6} | body)
        assert reply.status_code == 200, reply.text

    async def work() -> None:
        async with httpx2.AsyncClient(base_url=server.url, timeout=120) as client:
            await asyncio.gather(*(one(client, extra if i % 2 else {}) for i in range(7)))

    run(server, work())
