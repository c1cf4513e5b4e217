"""Ray Serve on this machine with two replicas: answers, streams, prefixes, and what dies under load.

Skipped by name without the extra `ray`, which the suite does not install: pip install -e '.[test,ray]'.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from tests.faults.client import Answer, post
from tests.ray.serve_run import CONTROLLER, ENGINE_PROCESS, ENGINES, INGRESS, ServeRun, serve_run

pytest.importorskip("ray", reason="needs the extra ray", exc_type=ImportError)
pytestmark = pytest.mark.xdist_group("ray")

PORT = 18731 + os.getpid() % 1000
LONG = "Tell me a story about a dog. "
CHATS = 8
REQUESTS = 24


@pytest.fixture(scope="module")
def run() -> Iterator[ServeRun]:
    with serve_run(PORT, num_replicas=2) as running:
        asyncio.run(running.replicas_are(2, 300))
        yield running


def content(answer: Answer) -> str:
    return json.loads(whole_body(answer))["choices"][0]["message"]["content"]


def whole_body(answer: Answer) -> bytes:
    """Join the chunks of HTTP."""
    if b"transfer-encoding: chunked" not in answer.headers:
        return answer.body
    body, rest = b"", answer.body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


async def load(run: ServeRun, *, stream: bool) -> list[Answer | OSError]:
    """Ask all at once; an error of the connection is an answer."""
    asked = (
        run.chat(f"{LONG} Number {index}.", stream=stream, max_tokens=100, ignore_eos=True) for index in range(REQUESTS)
    )
    return await asyncio.gather(*asked, return_exceptions=True)  # type: ignore[return-value]


def outcome(answer: Answer | OSError) -> str:
    """whole, error event, cut, or the status"""
    if isinstance(answer, OSError):
        return "no answer"
    if answer.status != 200:
        return str(answer.status)
    if b'"error"' in answer.body:
        return "error event" if b"data: [DONE]" in answer.body else "error"
    return "whole" if answer.complete or b'"usage"' in answer.body else "cut"


async def killed(run: ServeRun, name: str, *, stream: bool, delay: float) -> list[str]:
    """Load with the oldest process of this name killed in the middle."""
    answers = asyncio.create_task(load(run, stream=stream))
    await asyncio.sleep(delay)
    run.processes(name)[0].kill()
    return [outcome(answer) for answer in await answers]


def test_it_answers_and_streams(run: ServeRun) -> None:
    answer = asyncio.run(run.chat("What is the capital of France?"))
    assert content(answer) == "The capital of France is Paris."
    streamed = asyncio.run(run.chat("What is the capital of France?", stream=True))
    assert streamed.complete and streamed.body.count(b"data: ") > 5


def test_what_is_for_one_replica_is_refused(run: ServeRun) -> None:
    for path in ("/flush_cache", "/open_session", "/v1/files"):
        answer = asyncio.run(post(PORT, path, {}))
        assert answer.status in (404, 503) and b"replica" in answer.body, path


def test_a_later_turn_finds_its_pages(run: ServeRun) -> None:
    """With random routing half of the chats would not."""

    async def second_turns() -> list[int]:
        found = []
        for chat in range(CHATS):
            first = f"Chat {chat}: " + LONG * 8
            await run.chat(first, max_tokens=4)
            answer = await run.chat(first + " And on.", max_tokens=4)
            found.append(json.loads(whole_body(answer))["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    cached = asyncio.run(second_turns())
    assert all(tokens >= 48 for tokens in cached), cached


def test_chats_are_spread(run: ServeRun) -> None:
    used = [process.cpu_times().user for process in run.processes(ENGINE_PROCESS)]
    asyncio.run(load(run, stream=False))
    after = [process.cpu_times().user for process in run.processes(ENGINE_PROCESS)]
    assert len(used) == 2 and all(later > before for before, later in zip(used, after, strict=True))


def test_metrics_are_on_ray_s_port(run: ServeRun) -> None:
    [found] = json.loads((run.directory / "ray" / "prom_metrics_service_discovery.json").read_text())

    def read() -> str:
        return "".join(urlopen(f"http://{target}/metrics", timeout=10).read().decode() for target in found["targets"])

    deadline = time.monotonic() + 60
    while len(exported(text := read())) < 2 and time.monotonic() < deadline:
        time.sleep(2)
    assert len(exported(text)) == 2 and "ray_jaxserve_time_to_first_token_seconds_bucket{" in text


def exported(text: str) -> set[str]:
    """The replicas that have exported how many tokens they made."""
    lines = re.findall(r"^ray_jaxserve_generation_tokens_total\{(.*)\}", text, re.MULTILINE)
    return {replica for line in lines for replica in re.findall(r'replica="([^"]+)"', line)}


def test_an_engine_process_dies(run: ServeRun) -> None:
    """Its replica stays, and replays."""
    assert asyncio.run(killed(run, ENGINE_PROCESS, stream=True, delay=0.5)) == ["whole"] * REQUESTS
    asyncio.run(run.replicas_are(2, 120))


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_dies(run: ServeRun, stream: bool) -> None:
    """Requests without an answer go to the other replica; streams that have begun end with an error event."""
    outcomes = asyncio.run(killed(run, ENGINES, stream=stream, delay=0.5))
    print("replica killed, stream", stream, {each: outcomes.count(each) for each in set(outcomes)})
    assert set(outcomes) <= ({"whole", "error event"} if stream else {"whole"})
    again = asyncio.run(load(run, stream=stream))
    assert [outcome(answer) for answer in again] == ["whole"] * REQUESTS
    asyncio.run(run.replicas_are(2, 300))


def test_the_controller_dies(run: ServeRun) -> None:
    """It is started again, and no request notices."""
    [before] = run.processes(CONTROLLER)
    assert asyncio.run(killed(run, CONTROLLER, stream=True, delay=0.5)) == ["whole"] * REQUESTS

    async def started_again() -> None:
        async with asyncio.timeout(60):
            while [each.pid for each in run.processes(CONTROLLER)] in ([], [before.pid]):
                await asyncio.sleep(0.5)

    asyncio.run(started_again())
    assert [outcome(answer) for answer in asyncio.run(load(run, stream=False))] == ["whole"] * REQUESTS


def test_the_ingress_dies(run: ServeRun) -> None:
    """Open answers are lost, as without a second ingress they must be; later requests wait for the new one."""
    outcomes = asyncio.run(killed(run, INGRESS, stream=True, delay=0.5))
    print("ingress killed", {each: outcomes.count(each) for each in set(outcomes)})
    assert content(asyncio.run(run.chat("What is the capital of France?"))) == "The capital of France is Paris."
