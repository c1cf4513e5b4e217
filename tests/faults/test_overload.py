"""Ten times more requests than can be served: what is accepted completes, the rest is told so at once."""

import asyncio
import json
import re
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import uvloop

from tests.conftest import SMALL
from tests.faults.client import Answer, percentile, post
from tests.faults.conftest import QUEUE
from tests.faults.launched import Launched

T = TypeVar("T")

MEBIBYTE = 2**20
TICK = 0.002  # seconds between two looks at the clock
REQUEST: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
REQUEST |= {"stream": True, "temperature": 0}
# So long that ten times the capacity is some 200 requests a second: the queue is timed, not how fast a core accepts.
LONG = REQUEST | {"max_tokens": 600}
SHORT = REQUEST | {"max_tokens": 16}


async def capacity(port: int, request: dict[str, Any]) -> float:
    """Requests a second with every slot taken."""
    started = time.monotonic()
    answers = await asyncio.gather(*(post(port, "/v1/completions", request) for _ in range(SMALL["max_num_seqs"])))
    assert all(answer.complete for answer in answers)
    return len(answers) / (time.monotonic() - started)


class Arrivals:
    """Requests that come at a rate, whatever becomes of those before them."""

    def __init__(self, port: int, request: dict[str, Any], rate: float) -> None:
        self.rate = rate
        self.answers: list[Answer] = []
        self.lags: list[float] = []  # seconds by which this client itself came too late
        self._port = port
        self._body = json.dumps(request).encode()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        started, count = time.monotonic(), 0
        while (passed := time.monotonic() - started) < seconds:
            while count < passed * self.rate:
                count += 1
                task = asyncio.create_task(self._ask())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            before = time.monotonic()
            await asyncio.sleep(TICK)
            self.lags.append(time.monotonic() - before - TICK)
        await asyncio.gather(*self._tasks)

    async def _ask(self) -> None:
        self.answers.append(await post(self._port, "/v1/completions", self._body))


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


async def overload(server: Launched, request: dict[str, Any], seconds: float) -> tuple[Arrivals, int, int]:
    """Ten times the capacity for a while; the arrivals, memory before and at most.

    A slow machine takes longer: it is not overloaded before every slot and every entry of the queue is taken.
    """
    await capacity(server.port, SHORT)  # everything lazy is there
    arrivals = Arrivals(server.port, request, 10 * await capacity(server.port, request))
    seconds = max(seconds, 3 * (SMALL["max_num_seqs"] + QUEUE) / arrivals.rate)
    memory = Memory(server)
    before = memory.now()
    watch = asyncio.create_task(memory.watch())
    await arrivals.run(seconds)
    watch.cancel()
    return arrivals, before, memory.largest


def run(work: Coroutine[Any, Any, T]) -> T:
    """On uvloop: the client shares its cores with the server that it measures."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def inside(answer: Answer) -> float:
    """Seconds from the begin of a request's handling in the server to the head of its answer."""
    found = re.search(rb"\r\nopenai-processing-ms: (\d+)", answer.headers)
    assert found is not None
    return int(found[1]) / 1000


@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_ten_times_overload(server: Launched, seconds: float) -> None:
    """The short form runs on machines that do other things too: what it asserts depends on no speed."""
    timed = seconds >= 60
    expected, usual = server.canaries(), run(latency(server.port))
    arrivals, before, largest = run(overload(server, LONG if timed else REQUEST, seconds))
    ended = time.monotonic()
    accepted = [answer for answer in arrivals.answers if answer.status == 200]
    refused = [answer for answer in arrivals.answers if answer.status != 200]
    assert refused, f"{len(accepted)} requests at {arrivals.rate:.1f} a second were no overload: none was refused"
    refusal, lag = percentile([answer.total for answer in refused], 0.99), percentile(arrivals.lags, 0.99)
    while timed and run(latency(server.port)) > 1.5 * usual + 0.01:
        assert time.monotonic() < ended + 10, f"requests are slower than before, when they took {usual:.3f} s"
    grown = (Memory(server).now() - before) / MEBIBYTE
    print(
        f"{arrivals.rate:.0f} requests/s for {seconds:.0f} s: {len(accepted)} completed, {len(refused)} refused, "
        f"p50 {percentile([answer.total for answer in refused], 0.5) * 1000:.0f} ms, p99 {refusal * 1000:.0f} ms "
        f"({percentile([inside(answer) for answer in refused], 0.99) * 1000:.0f} ms of it in the server's code; "
        f"the client was {lag * 1000:.0f} ms late), "
        f"memory +{(largest - before) / MEBIBYTE:.0f} MB at most, {grown:+.0f} MB after; "
        f"alone {usual * 1000:.0f} ms before"
    )
    assert all(answer.complete for answer in accepted) and len(accepted) >= SMALL["max_num_seqs"]
    assert {answer.status for answer in refused} == {429}
    assert all(b"\r\nretry-after: " in answer.headers for answer in refused)
    if timed:
        assert refusal < 0.1
    # At once: not after a wait for a slot, which is how long a request takes at the least.
    assert percentile([inside(answer) for answer in refused], 0.5) < min(answer.total for answer in accepted) / 2
    assert (largest - before) / MEBIBYTE < 200 and grown < 100
    assert server.canaries() == expected and server.settled().idle
