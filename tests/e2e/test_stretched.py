"""Requests whose fields are those of the routes' own schemas, with sizes, depths and types stretched.

No 5xx, no restart, nothing left behind, neither loop held for long, and another tenant's text as before. How late the
loops come on an idle machine is told by `python -m benchmarks.lag`.
"""

import ctypes
import gc
import itertools
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.stretched import stretched
from jaxserve.cli.http_server import keep_heap_small
from jaxserve.config import Config
from tests.api.loop_meter import LoopMeter
from tests.conftest import SMALL

from .engine_meter import RealServer

OPENAI_FIELDS = {"message", "type", "param", "code"}
ERROR_FIELDS = {"/v1/messages": {"message", "type"}}
ERROR_FIELDS |= {path: {"a text"} for path in ("/api/chat", "/api/generate", "/api/embed")}
CONTROL: dict[str, Any] = {"model": "demo", "prompt": "the control tenant's words", "temperature": 0, "max_tokens": 8}
MINUTES = float(os.environ.get("JAXSERVE_TEST_MINUTES", "10"))  # of the long form
HELD = 0.5  # CPU seconds: on an idle machine the goal is 0.25 at most
GROWTH = 1.05  # of the memory of the process, from before to after
ARENAS = 16 << 20  # bytes that the allocator may keep for threads that ran meanwhile


@pytest.fixture(scope="module")
def server(compile_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    config = Config.of(compile_cache=compile_cache, **SMALL).replace(logging={"level": "error"})
    keep_heap_small()  # as `jaxserve launch` does
    with RealServer(config, store=tmp_path_factory.mktemp("store")) as server:
        yield server


def left_behind(server: RealServer) -> list[int]:
    """What a server at rest has none of."""
    state = server.app.state.server
    sized = (state.text_work, state.template_work)
    pools = (state.body_work, *(pool for each in sized for pool in (each.short, each.long)))
    held = [number for pool in pools for number in (pool.waiting.jobs, pool.waiting.size)]
    return [*held, state.bodies.held, server.engine.num_live, len(state.unread.held()), *server.held()]


class Asker:
    """Sends requests by their numbers and looks at what became of each."""

    def __init__(self, server: RealServer) -> None:
        self._server, self.statuses = server, Counter[int]()
        self._expected = self._control()

    def _control(self) -> str:
        return self._server.post("/v1/completions", CONTROL).json()["choices"][0]["text"]

    def ask(self, number: int) -> None:
        request = stretched(random.Random(number))
        named = f"{number}: {request.path} {request.changed} {request.body[:200]!r}"
        try:
            headers = {"content-type": "application/json"}
            answer = self._server.http.post(request.path, content=request.body, headers=headers)
        except httpx2.TransportError as error:
            raise AssertionError(f"no answer to {named}") from error
        self.statuses[answer.status_code] += 1
        assert answer.status_code < 500, (named, answer.text[:300])
        if answer.status_code >= 400:
            error = json.loads(answer.content)["error"]
            fields = set(error) if isinstance(error, dict) else {"a text"}
            assert fields == ERROR_FIELDS.get(request.path, OPENAI_FIELDS), named
        assert self._control() == self._expected, named
        self._server.wait(lambda: not any(left_behind(self._server)), f"nothing is left behind {named}")


def resting_memory() -> int:
    """Bytes of this process that no file backs, without what its allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def ask_some(asker: Asker, count: int) -> None:
    @seed(17)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=cast("Any", list(HealthCheck)),
    )  # fmt: skip
    @given(st.integers(0, 2**32))
    def ask(number: int) -> None:
        asker.ask(number)

    ask()


def check(server: RealServer, asker: Asker, meter: LoopMeter, memory: int) -> None:
    assert server.engine.restarts == 0
    assert {200, 400, 413} <= asker.statuses.keys()
    assert meter.longest < HELD and server.longest_iteration < HELD, (meter.longest, server.longest_iteration)
    assert resting_memory() < GROWTH * memory + ARENAS, (resting_memory(), memory)


def test_no_request_costs_the_others_much(server: RealServer) -> None:
    asker = Asker(server)
    ask_some(asker, 20)  # what is kept for later is there now: vocabularies, grammars, pools of threads
    memory = resting_memory()
    with LoopMeter(server) as meter:
        ask_some(asker, 60)
    check(server, asker, meter, memory)


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 1800)
def test_none_does_for_a_long_time(server: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
    asker, numbers, began = Asker(server), itertools.count(), time.monotonic()
    memory = None
    with LoopMeter(server) as meter:
        while (minutes := (time.monotonic() - began) / 60) < MINUTES:
            asker.ask(next(numbers))
            memory = resting_memory() if memory is None and minutes > MINUTES / 4 else memory
    with capsys.disabled():
        held = f"API {meter.longest * 1e3:.0f} ms, engine {server.longest_iteration * 1e3:.0f} ms"
        print(f"\n{dict(asker.statuses)}; held: {held}")
        print(f"memory {(memory or 0) / 2**20:.0f} -> {resting_memory() / 2**20:.0f} MiB")
    assert memory is not None
    check(server, asker, meter, memory)
