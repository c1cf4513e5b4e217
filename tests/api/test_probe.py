"""GET /health_generate: does the engine make tokens?"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.api import health
from jaxserve.config import Config
from jaxserve.errors import QueueFullError
from jaxserve.types.messages import EngineStats, Outputs

from .conftest import LiveServer

PATH = "/health_generate"


def test_one_token_is_made_and_not_counted(server: LiveServer) -> None:
    before = server.http.get("/metrics").text.count("request_success")
    answer = server.http.get(PATH)
    assert answer.status_code == 200 and answer.json() == {"status": "ready"}
    (request,) = server.link.seen
    assert request.params.max_tokens == 1 and len(request.prompt_token_ids) == 1
    assert server.http.get("/metrics").text.count("request_success") == before


def test_it_needs_the_key() -> None:
    with LiveServer(Config().replace(server={"api_key": "secret"})) as server:
        assert server.http.get(PATH).status_code == 401
        assert server.http.get(PATH, headers={"authorization": "Bearer secret"}).status_code == 200


def test_an_engine_that_makes_nothing_is_not_ready(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "TIMEOUT", 0.3)
    monkeypatch.setattr(health, "STATS_AGE", 0.0)
    server.call(server.link.hold.clear)
    answer = server.http.get(PATH)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"
    server.wait(lambda: not server.link.running, "the probe's request was left behind")
    server.call(server.link.hold.set)


@pytest.mark.parametrize("full", [False, True])
def test_an_engine_that_computes_for_others_is_ready(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Though the probe's own request waits in the queue, or was refused by it."""
    monkeypatch.setattr(health, "STATS_AGE", 0.0)

    def refuse(*args: object) -> None:
        raise QueueFullError("full")

    if full:
        monkeypatch.setattr(server.engine, "check_queue", refuse)
    server.call(server.link.hold.clear)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.http.get, PATH)
        for steps in itertools.takewhile(lambda _: not asked.done(), itertools.count()):
            stats = EngineStats(steps=steps)
            server.call(lambda stats=stats: server.link._messages.put_nowait(Outputs([], stats)))
            server.wait(lambda: server.link._messages.empty(), "the stats were not read")
        assert asked.result().status_code == 200
    server.wait(lambda: not server.link.running, "the probe's request was left behind")
    server.call(server.link.hold.set)
