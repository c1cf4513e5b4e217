"""Ten times more requests than can be served: what is accepted completes, the rest is told so at once."""

import asyncio
import time
from typing import Any

import pytest

from tests.conftest import SMALL
from tests.faults.client import Answer, percentile, post
from tests.faults.launched import Launched

MEBIBYTE = 2**20
REQUEST: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
REQUEST |= {"stream": True, "temperature": 0}
SHORT = REQUEST | {"max_tokens": 16}


async def capacity(port: int) -> float:
    """Requests a second with every slot taken."""
    started = time.monotonic()
    answers = await asyncio.gather(*(post(port, "/v1/completions", REQUEST) for _ in range(SMALL["max_num_seqs"])))
    assert all(answer.complete for answer in answers)
    return len(answers) / (time.monotonic() - started)


async def arrivals(port: int, rate: float, seconds: float) -> list[Answer]:
    """Requests that come at `rate`, whatever becomes of those before them."""
    tasks: list[asyncio.Task[Answer]] = []
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        while len(tasks) < passed * rate:
            tasks.append(asyncio.create_task(post(port, "/v1/completions", REQUEST)))
        await asyncio.sleep(0.002)
    return list(await asyncio.gather(*tasks))


async def latency(port: int) -> float:
    """Median seconds of a short request alone."""
    return percentile([(await post(port, "/v1/completions", SHORT)).total for _ in range(9)], 0.5)


class Memory:
    """The largest resident size of a server while this runs."""

    def __init__(self, server: Launched) -> None:
        self._server = server
        self.largest = 0

    def now(self) -> int:
        return sum(process.memory_info().rss for process in [self._server.api, *self._server.children()])

    async def watch(self) -> None:
        while True:
            self.largest = max(self.largest, self.now())
            await asyncio.sleep(0.5)


async def overload(server: Launched, seconds: float) -> tuple[float, list[Answer], int, int]:
    """Ten times the capacity for a while; the rate, the answers, memory before and at most."""
    await capacity(server.port)  # everything lazy is there
    rate = 10 * await capacity(server.port)
    memory = Memory(server)
    before = memory.now()
    watch = asyncio.create_task(memory.watch())
    answers = await arrivals(server.port, rate, seconds)
    watch.cancel()
    return rate, answers, before, memory.largest


@pytest.mark.parametrize(("seconds", "limit"), [(3.0, 1.0), pytest.param(60.0, 0.1, marks=pytest.mark.slow)])
def test_ten_times_overload(server: Launched, seconds: float, limit: float) -> None:
    """limit: seconds to a refusal. The short form runs on machines that do other things too."""
    expected, usual = server.canaries(), asyncio.run(latency(server.port))
    rate, answers, before, largest = asyncio.run(overload(server, seconds))
    ended = time.monotonic()
    accepted = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    refusal = percentile([answer.total for answer in refused], 0.99)
    while (after := asyncio.run(latency(server.port))) > 1.5 * usual + 0.01:
        assert time.monotonic() < ended + 10, f"{after:.3f} s, it was {usual:.3f} s"
    grown = (Memory(server).now() - before) / MEBIBYTE
    print(
        f"{rate:.0f} requests/s for {seconds:.0f} s: {len(accepted)} completed, {len(refused)} refused, "
        f"p99 {refusal * 1000:.0f} ms, memory +{(largest - before) / MEBIBYTE:.0f} MB at most, {grown:+.0f} MB after; "
        f"alone {usual * 1000:.0f} ms before, {after * 1000:.0f} ms {time.monotonic() - ended:.1f} s after"
    )
    assert all(answer.complete for answer in accepted) and len(accepted) >= SMALL["max_num_seqs"]
    assert {answer.status for answer in refused} == {429}
    assert all(b"\r\nretry-after: " in answer.headers for answer in refused)
    assert refusal < limit
    assert (largest - before) / MEBIBYTE < 200 and grown < 100
    assert server.canaries() == expected and server.settled().idle
