"""Bounds in time and number that an operator sets, as clients meet them: real HTTP, before an engine with one slot."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx2
import msgspec

from jaxserve import launch_server
from jaxserve.engine.messages import Located
from jaxserve.engine.server import BuiltEngine, Channel
from jaxserve.engine.thread_link import ThreadLink
from jaxserve.serving import RunningServer
from jaxserve.text.tokenizer import Tokenizer
from tests.api.fakes import DEMO, demo_info
from tests.fakes import make_core, small_config
from tests.faults.faulty_runner import FaultyRunner

STEP = 0.02  # seconds
REQUEST: dict[str, Any] = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True}


@contextlib.contextmanager
def serving(queue_timeout: float | None = None, **keys: Any) -> Iterator[RunningServer]:
    """A server whose engine has one slot and takes its time."""

    def build(channel: Channel) -> BuiltEngine:
        channel.send(Located(str(DEMO), str(DEMO)))
        core = make_core(small_config(max_num_seqs=1, queue_timeout=queue_timeout))
        core.runner = FaultyRunner(core.runner, lambda output: time.sleep(STEP))
        info = msgspec.structs.replace(demo_info(Tokenizer.from_directory(DEMO)), max_num_seqs=1, max_model_len=128)
        return BuiltEngine(core, info, lambda spec: Future())

    with launch_server(make_link=lambda config: ThreadLink(config, build), **keys) as server:
        yield server


def post(server: RunningServer, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/completions", json=REQUEST | fields, timeout=20)


def wait_until_idle(server: RunningServer, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (numbers := server.launch.engine.stats()).num_running or numbers.num_pages_used:
        assert time.monotonic() < deadline, numbers
        time.sleep(0.02)


@contextlib.contextmanager
def occupied(server: RunningServer) -> Iterator[None]:
    """The slot is another's meanwhile."""
    thread = threading.Thread(target=post, args=(server,))
    thread.start()
    while not server.launch.engine.num_live:
        time.sleep(0.005)
    yield
    thread.join()


def test_a_request_that_takes_too_long() -> None:
    with serving(request_timeout=0.5) as server:
        answer = post(server)
        assert answer.status_code == 504 and "deadline" in answer.json()["error"]["message"]
        wait_until_idle(server, 1)
        events = [line for line in post(server, stream=True).text.split("\n\n") if line]
        assert len(events) > 3 and '"error"' in events[-2] and events[-1] == "data: [DONE]"
        wait_until_idle(server, 1)
        assert post(server, max_tokens=3).status_code == 200


def test_a_request_that_waits_too_long() -> None:
    with serving(queue_timeout=0.3) as server, occupied(server):
        started = time.monotonic()
        answer = post(server, max_tokens=1)
        assert answer.status_code == 504 and "queue" in answer.json()["error"]["message"]
        assert 0.2 < time.monotonic() - started < 1.5


def test_more_waiting_prompt_tokens_than_allowed() -> None:
    with serving(max_queued_tokens=8) as server, occupied(server):
        waiting = threading.Thread(target=post, args=(server,), kwargs={"prompt": [1] * 6, "max_tokens": 1})
        waiting.start()
        while not server.launch.engine.stats().num_waiting_tokens:
            time.sleep(0.01)
        refused = post(server, prompt=[1] * 3)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert post(server, prompt=[1, 2], max_tokens=1).status_code == 200
        waiting.join()


def test_more_waiting_requests_than_allowed() -> None:
    with serving(max_queued_requests=2) as server:
        answers: list[httpx2.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(post(server, max_tokens=10))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 3
