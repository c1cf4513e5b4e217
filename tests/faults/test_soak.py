"""Mixed traffic with clients that leave and clients that err: nothing grows, nothing is compiled."""

import asyncio
import dataclasses
import json
import random
import time
from typing import Any

import numpy as np
import pytest

from tests.faults.client import post
from tests.faults.launched import Launched

CLIENTS = 12
ABORTS, MISTAKES = 0.05, 0.01
SETTLING = 300.0  # seconds in which caches fill and allocators find their size
SCHEMAS = [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}, "required": [f"p{i}"]} for i in range(8)]
BAD = [b"{", b"[]", b"\xff\xfe", b'{"model": "demo", "prompt": "a", "n": 0}', b'{"model": "other", "prompt": "a"}']
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMAS[0]}}


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    words = " ".join(str(rng.randrange(50)) for _ in range(rng.choice([3, 30, 120])))
    body: dict[str, Any] = {"model": "demo", "max_tokens": rng.choice([1, 20, 60]), "stream": rng.random() < 0.5}
    body |= rng.choice([{}, {"n": 3}, {"logprobs": True, "top_logprobs": 3}, {"temperature": 0.0}, {"seed": 5}])
    body |= rng.choice([{}, {"frequency_penalty": 0.5}, {"stop": ["a"]}, {"logit_bias": {"9": 5}}, {"min_tokens": 1}])
    match rng.randrange(5):
        case 0:
            schema = {"name": "x", "schema": rng.choice(SCHEMAS)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        case 1:
            body["tools"] = [TOOL]
        case 2:
            sampling = {"max_new_tokens": 20, "temperature": 0.7}
            return "/generate", {"text": words, "stream": body["stream"], "sampling_params": sampling}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}


class Traffic:
    """Clients that ask until a time; counts by outcome."""

    def __init__(self, port: int, until: float) -> None:
        self.port = port
        self.until = until
        self.counts: dict[str, int] = {}

    async def run(self) -> None:
        await asyncio.gather(*(self._client(random.Random(index)) for index in range(CLIENTS)))

    async def _client(self, rng: random.Random) -> None:
        while time.monotonic() < self.until:
            kind = await self._one(rng)
            self.counts[kind] = self.counts.get(kind, 0) + 1

    async def _one(self, rng: random.Random) -> str:
        path, body = draw(rng)
        chance = rng.random()
        if chance < MISTAKES:
            answer = await post(self.port, "/v1/completions", rng.choice(BAD))
            assert answer.status in (400, 404)
            return "mistakes"
        if chance < MISTAKES + ABORTS:
            try:
                await asyncio.wait_for(post(self.port, path, body), rng.random() * 0.3)
            except TimeoutError:
                return "aborts"
        answer = await post(self.port, path, body)
        assert answer.status == 200, answer.body
        assert b'"error"' not in answer.body.replace(json.dumps(body).encode(), b"")
        return "completed"


async def watched(server: Launched, seconds: float) -> tuple[Traffic, list[tuple[float, float, float]]]:
    """Traffic for a while, and (seconds, MB of the API process, MB of the engine process) every two seconds."""
    started = time.monotonic()
    traffic = Traffic(server.port, started + seconds)
    run = asyncio.create_task(traffic.run())
    samples = []
    while not run.done():
        engine = max(server.children(), key=lambda process: process.memory_info().rss)
        sizes = [process.memory_info().rss / 2**20 for process in (server.api, engine)]
        samples.append((time.monotonic() - started, *sizes))
        await asyncio.wait((run,), timeout=2.0)
    await run
    return traffic, samples


@pytest.mark.parametrize("seconds", [8.0, pytest.param(1200.0, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_mixed_traffic_leaves_nothing_behind(server: Launched, seconds: float) -> None:
    asyncio.run(Traffic(server.port, time.monotonic() + 3.0).run())
    expected, before = server.canaries(), server.settled()
    traffic, samples = asyncio.run(watched(server, seconds))
    last = server.settled()
    print(f"{seconds:.0f} s of mixed traffic: {traffic.counts}; {before} -> {last}")
    assert last == dataclasses.replace(before, descriptors=last.descriptors)
    assert all(now <= then for now, then in zip(last.descriptors, before.descriptors, strict=True))
    assert server.stats()["jaxserve:xla_compilations_total"] == 0
    assert server.canaries() == expected
    if seconds > SETTLING:
        late = np.array([sample for sample in samples if sample[0] > SETTLING])
        for name, sizes in (("API", late[:, 1]), ("engine", late[:, 2])):
            slope = np.polyfit(late[:, 0] / 60, sizes, 1)[0]
            print(f"{name} process: {sizes[0]:.1f} MB -> {sizes[-1]:.1f} MB, {slope:+.3f} MB a minute")
            assert slope < 0.5
