"""Streams whose first token is late: headers come early, comments keep them alive, and errors become events."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxserve.api.generate import wire
from jaxserve.api.http import sse
from jaxserve.config import Config
from jaxserve.errors import EngineDeadError
from tests.api.conftest import LiveServer, reply_with

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "demo", "prompt": "Hi", "max_tokens": 9},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hi", "store": False},
    "/generate": {"text": "Hi"},
    "/api/chat": {name: CHAT[name] for name in ("model", "messages")},
    "/api/generate": {"model": "demo", "prompt": "Hi"},
}
PINGS = {"/v1/messages": "event: ping", "/api/chat": None, "/api/generate": None}


@pytest.fixture(scope="module")
def slow() -> Iterator[LiveServer]:
    with LiveServer(Config().replace(server={"ping_interval": 0.05})) as server:
        yield server


@pytest.fixture(autouse=True)
def held(slow: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No token is made until the test lets go of the link."""
    for module in (sse, wire):
        monkeypatch.setattr(module, "START_SECONDS", 0.05)
    reply_with(slow, "one two")
    slow.call(slow.link.hold.clear)
    yield
    slow.call(slow.link.hold.set)
    slow.wait(lambda: not slow.link.running and slow.engine.num_live == 0, "requests were left behind")


@pytest.mark.parametrize("path", BODIES)
def test_a_late_answer_begins_early_and_is_kept_alive(slow: LiveServer, path: str) -> None:
    ping, lines = PINGS.get(path, ": ping"), []
    with slow.http.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
        assert response.status_code == 200  # while no token has been made
        assert ("ndjson" if ping is None else "event-stream") in response.headers["content-type"]
        if ping is None:
            slow.call(slow.link.hold.set)
        for line in response.iter_lines():
            lines.append(line)
            if lines.count(ping) == 2:
                slow.call(slow.link.hold.set)
    if ping is None:
        assert all(json.loads(line) for line in lines) and json.loads(lines[-1])["done"]
    else:
        first = lines.index(ping)
        assert lines.count(ping) >= 2 and not any(
            line.startswith("data: {") and "one" in line for line in lines[:first]
        )
        assert any("two" in line for line in lines) and lines[-2].startswith("data: ")


def test_the_client_of_openai_reads_over_comments(slow: LiveServer) -> None:
    with slow.client.chat.completions.create(**CHAT, stream=True) as chunks:
        slow.call(slow.link.hold.set)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two"
    with slow.client.completions.create(**BODIES["/v1/completions"], stream=True) as chunks:
        assert "".join(chunk.choices[0].text for chunk in chunks) == "one two"


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_before_the_first_token_ends_its_request(slow: LiveServer, path: str) -> None:
    with slow.http.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
        assert response.status_code == 200
    slow.wait(lambda: not slow.link.running and slow.engine.num_live == 0, "the request went on")


@pytest.mark.parametrize("path", BODIES)
def test_an_error_after_the_headers_is_an_event(slow: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(*args: Any, **options: Any) -> Any:
        await slow.link.hold.wait()
        raise EngineDeadError("The engine is gone.")
        yield

    monkeypatch.setattr(slow.engine, "generate", dies)
    with slow.http.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
        assert response.status_code == 200
        slow.call(slow.link.hold.set)
        text = response.read().decode()
    assert "The engine is gone." in text
    assert text.endswith("data: [DONE]\n\n") == (path not in PINGS)


def test_an_error_within_the_first_second_has_its_status(slow: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(*args: Any, **options: Any) -> Any:
        raise EngineDeadError("The engine is gone.")
        yield

    monkeypatch.setattr(slow.engine, "generate", dies)
    for path, body in BODIES.items():
        assert slow.post(path, body | {"stream": True}).status_code == 503, path
    with pytest.raises(openai.InternalServerError):
        slow.client.chat.completions.create(**CHAT, stream=True)


def test_no_pings_if_the_operator_wants_none() -> None:
    with LiveServer(Config().replace(server={"ping_interval": None})) as server:
        reply_with(server, "one two three")
        server.link.delay = 0.1
        text = server.post("/v1/chat/completions", CHAT | {"stream": True}).text
        assert ": ping" not in text and "three" in text
