"""Bounds in time and number that an operator sets, as clients meet them: real HTTP, before an engine with one slot."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import msgspec

from jaxserve import launch_server
from jaxserve.engine.server import BuiltEngine, Channel
from jaxserve.library.serving import RunningServer
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import Located
from tests.api.fakes import DEMO, demo_info
from tests.fakes import make_core, small_config
from tests.faults.faulty_runner import FaultyRunner
from tests.thread_link import ThreadLink
from tests.waiting import LAST_RESORT, wait_until

STEP = 0.05  # seconds
QUICK_STEPS = 6  # of a server, before those of STEP
REQUEST: dict[str, Any] = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 120, "ignore_eos": True}


@contextlib.contextmanager
def serving(queue_timeout: float | None = None, **keys: Any) -> Iterator[RunningServer]:
    """A server whose engine has one slot and takes its time: a request is a matter of six seconds, or more."""
    steps = itertools.count()

    def build(channel: Channel) -> BuiltEngine:
        channel.send(Located(str(DEMO)))
        core = make_core(small_config(max_num_seqs=1, queue_timeout=queue_timeout))
        core.runner = FaultyRunner(core.runner, lambda output: time.sleep(STEP) if next(steps) > QUICK_STEPS else None)
        info = msgspec.structs.replace(demo_info(Tokenizer.from_directory(DEMO)), max_num_seqs=1, max_model_len=128)
        return BuiltEngine(core, info, lambda spec: Future())

    with launch_server(make_link=lambda config: ThreadLink(config, build), **keys) as server:
        yield server


def post(server: RunningServer, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/completions", json=REQUEST | fields, timeout=LAST_RESORT)


def wait_until_idle(server: RunningServer) -> None:
    def idle() -> bool:
        numbers = server.launch.engine.stats()
        return not (numbers.num_running or numbers.num_pages_used)

    wait_until(idle, "the engine is idle")


@contextlib.contextmanager
def occupied(server: RunningServer) -> Iterator[None]:
    """The slot is another's meanwhile: one who then leaves."""
    url, body = f"{server.url}/v1/completions", REQUEST | {"stream": True}
    with httpx2.stream("POST", url, json=body, timeout=LAST_RESORT) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield


@contextlib.contextmanager
def posted(server: RunningServer, count: int, **fields: Any) -> Iterator[list[httpx2.Response]]:
    """Requests that are the server's on entering, and whose answers are here on leaving."""
    before = server.launch.engine.num_live
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(post, server, **fields) for _ in range(count)]
        wait_until(lambda: server.launch.engine.num_live == before + count, "the requests are live")
        answers: list[httpx2.Response] = []
        yield answers
        answers += [future.result() for future in futures]


def test_a_request_that_takes_too_long() -> None:
    with serving(request_timeout=1.0) as server:
        events = [line for line in post(server, stream=True).text.split("\n\n") if line]
        assert len(events) > 3 and '"error"' in events[-2] and events[-1] == "data: [DONE]"
        wait_until_idle(server)
        answer = post(server)
        assert answer.status_code == 504 and "deadline" in answer.json()["error"]["message"]
        wait_until_idle(server)
        assert post(server, max_tokens=1).status_code == 200


def test_a_request_that_waits_too_long() -> None:
    with serving(queue_timeout=0.3) as server, occupied(server):
        answer = post(server, max_tokens=1)
        assert answer.status_code == 504 and "queue" in answer.json()["error"]["message"]
        assert server.launch.engine.num_live == 1  # it has not waited for the slot


def test_more_waiting_prompt_tokens_than_allowed() -> None:
    with serving(max_queued_tokens=8) as server, contextlib.ExitStack() as stack:
        with occupied(server):
            first = stack.enter_context(posted(server, 1, prompt=[1] * 6, max_tokens=1))
            wait_until(lambda: server.launch.engine.stats().num_waiting_tokens, "the numbers of the queue")
            refused = post(server, prompt=[1] * 3)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            second = stack.enter_context(posted(server, 1, prompt=[1, 2], max_tokens=1))
        stack.close()
        assert [answer.status_code for answer in first + second] == [200, 200]


def test_more_waiting_requests_than_allowed() -> None:
    with serving(max_queued_requests=2) as server, contextlib.ExitStack() as stack:
        with occupied(server):
            accepted = stack.enter_context(posted(server, 2, max_tokens=1))
            assert {post(server, max_tokens=1).status_code for _ in range(5)} == {429}
        stack.close()
        assert [answer.status_code for answer in accepted] == [200, 200]
