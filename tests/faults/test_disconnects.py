"""Clients that leave at any moment: nothing of them is left, anywhere; the long form says how soon."""

import asyncio
import json
import random
import time
from typing import Any

import pytest

from tests.faults.launched import Launched
from tests.waiting import LAST_RESORT

CLIENTS_AT_ONCE = 50


def large_schema(rng: random.Random) -> dict[str, Any]:
    """One that nobody has compiled yet, and that takes a while."""
    names = [f"p{rng.randrange(10**9)}" for _ in range(rng.choice([3, 60]))]
    kinds = [{"type": "integer"}, {"type": "string", "pattern": "^[a-f]{3,9}$"}, {"enum": names[:3]}]
    return {"type": "object", "properties": {name: rng.choice(kinds) for name in names}, "required": names}


def draw_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Any route that generates, streaming or not, one choice or several, free or under a new grammar."""
    prompt = " ".join(str(rng.randrange(1000)) for _ in range(rng.choice([5, 100])))
    common = {"model": "demo", "stream": rng.random() < 0.5, "max_tokens": 300, "ignore_eos": True}
    match rng.randrange(5):
        case 0:
            return "/v1/completions", common | {"prompt": [prompt, prompt + "a"], "n": rng.randrange(1, 4)}
        case 1:
            sampling = {"max_new_tokens": 300, "ignore_eos": True}
            return "/generate", {"text": prompt, "stream": common["stream"], "sampling_params": sampling}
        case 2:
            schema = {"name": "x", "schema": large_schema(rng)}
            common["response_format"] = {"type": "json_schema", "json_schema": schema}
        case 3:
            common["n"] = rng.randrange(2, 6)
    return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": prompt}]}


async def leave_somewhere(port: int, rng: random.Random) -> None:
    """Send a request, or a part of one, read for a random time, and go: with FIN or with RST."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path, body = draw_request(rng)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost:\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sent = head.encode() + data
    writer.write(sent if rng.random() < 0.9 else sent[: rng.randrange(len(sent))])
    try:
        async with asyncio.timeout(rng.choice([0.0, 0.02, 0.2, 1.0]) * rng.random()):
            while await reader.read(4096):
                pass
    except (TimeoutError, ConnectionError):
        pass
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


async def storm(port: int, count: int, seed: int) -> None:
    gate = asyncio.Semaphore(CLIENTS_AT_ONCE)

    async def one(index: int) -> None:
        async with gate:
            await leave_somewhere(port, random.Random(seed * 1_000_003 + index))

    await asyncio.gather(*(one(index) for index in range(count)))


@pytest.mark.parametrize(("count", "limit"), [(20, LAST_RESORT), pytest.param(1000, 1.0, marks=pytest.mark.slow)])
def test_clients_cut_at_random_phases_leave_nothing(server: Launched, count: int, limit: float) -> None:
    """limit: seconds after the last cut. The short form runs on machines that do other things too."""
    asyncio.run(storm(server.port, 20, seed=99))  # the grammar process and all lazy parts exist from here on
    expected, before = server.canaries(), server.settled()
    asyncio.run(storm(server.port, count, seed=1))
    last_cut = time.monotonic()
    seconds = server.settle(before) - last_cut
    print(f"{count} clients cut; at baseline {seconds:.2f} s after the last cut: {before}")
    assert seconds < limit
    assert server.canaries() == expected
    assert server.stats()["jaxserve:xla_compilations_total"] == 0
