"""Measure what a flood of one API key costs another, and how two keys that both flood share the server.

    jaxserve launch --server.keys '[{"name": "one", "value": "key-of-one"}, {"name": "two", "value": "key-of-two"},
        {"name": "three", "value": "key-of-three", "weight": 3}]' --server.admin-api-key admin-key
    python -m benchmarks.tenants --base-url http://127.0.0.1:8000 --requests 200 --seconds 60

First, key two sends short requests one after the other: alone, and while key one keeps --flood long requests in hand.
Then keys one and three keep as many in hand for --seconds; their shares of the tokens, by /key_usage, should be 1 to 3.
Prints one JSON object. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import numpy as np

from jaxserve.bench.load import environment, find_model, root_url

PAUSE = 0.05  # seconds between two short requests: a tenant that takes less than its share


class Client:
    """One API key at one server."""

    def __init__(self, http: httpx2.AsyncClient, model: str, key: str, seed: int) -> None:
        self._http = http
        self._model = model
        self._headers = {"authorization": f"Bearer {key}"}
        self._random = random.Random(seed)

    async def first_token(self, prompt_tokens: int, max_tokens: int) -> float:
        """Send a request; return the milliseconds until its first event, having read all of it."""
        prompt = [self._random.randrange(300, 1000) for _ in range(prompt_tokens)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        began, first = time.perf_counter(), 0.0
        async with self._http.stream("POST", "/v1/completions", json=body, headers=self._headers) as response:
            response.raise_for_status()
            async for _ in response.aiter_lines():
                first = first or time.perf_counter() - began
        return 1000 * first

    @asynccontextmanager
    async def flooding(self, count: int, prompt_tokens: int, max_tokens: int) -> AsyncIterator[None]:
        """Keep `count` requests in hand meanwhile."""

        async def again() -> None:
            while True:
                await self.first_token(prompt_tokens, max_tokens)

        tasks = [asyncio.create_task(again()) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def short_requests(client: Client, options: argparse.Namespace) -> list[float]:
    times = []
    for _ in range(options.requests):
        times.append(await client.first_token(options.short_len, options.short_output))
        await asyncio.sleep(PAUSE)
    return times


async def tokens_of(http: httpx2.AsyncClient, admin_key: str) -> dict[str, int]:
    answer = await http.get("/key_usage", headers={"authorization": f"Bearer {admin_key}"})
    data = answer.raise_for_status().json()["data"]
    return {key["name"]: key["prompt_tokens"] + key["completion_tokens"] for key in data}


def spread(times: list[float]) -> dict[str, float]:
    return {f"p{point}": round(float(np.percentile(times, point)), 2) for point in (50, 90, 99, 100)}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the report."""
    model = await find_model(options.base_url, options.keys[0])
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=options.base_url, timeout=600, limits=limits) as http:
        one, two, three = (Client(http, model, key, seed) for seed, key in enumerate(options.keys))
        flood = (options.flood, options.long_len, options.long_output)
        await short_requests(two, options)  # the first requests of a server take longer
        alone = await short_requests(two, options)
        async with one.flooding(*flood):
            await asyncio.sleep(2)
            beside = await short_requests(two, options)
        async with one.flooding(*flood), three.flooding(*flood):
            await asyncio.sleep(5)
            before = await tokens_of(http, options.admin_key)
            await asyncio.sleep(options.seconds)
            after = await tokens_of(http, options.admin_key)
    served = {name: after[name] - before[name] for name in ("one", "three")}
    return {
        "environment": environment(),
        "alone": spread(alone),
        "beside_a_flood": spread(beside),
        "ratio": {name: round(spread(beside)[name] / value, 2) for name, value in spread(alone).items()},
        "served_tokens": served,
        "share_of_three": round(served["three"] / sum(served.values()), 4),
    }


def main() -> None:
    """Measure the server of the command line and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", type=root_url, default="http://127.0.0.1:8000", help="with or without /v1")
    parser.add_argument("--keys", nargs=3, default=["key-of-one", "key-of-two", "key-of-three"])
    parser.add_argument("--admin-key", default="admin-key")
    parser.add_argument("--requests", type=int, default=200, help="short requests, alone and beside the flood")
    parser.add_argument("--short-len", type=int, default=32, help="tokens of a short prompt")
    parser.add_argument("--short-output", type=int, default=4, help="tokens of a short answer")
    parser.add_argument("--flood", type=int, default=96, help="long requests in hand")
    parser.add_argument("--long-len", type=int, default=400, help="tokens of a long prompt")
    parser.add_argument("--long-output", type=int, default=400, help="tokens of a long answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="that the shares are counted")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
