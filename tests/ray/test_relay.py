"""A request from the ingress to a replica and its answer back, without Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.api.body_cost import BODIES_IN_SUM
from jaxserve.config import Config
from jaxserve.errors import QueueFullError
from jaxserve.ray.relay import (
    ATTEMPTS,
    RelayedAnswer,
    RelayedRequest,
    ReplicaLostError,
    ingress_app,
    run_app,
    with_allowed_hosts,
)

SMALL = {"max_body_bytes": 2048}
EVENT = b'data: {"n": 1}\n\n'


def started(kind: bytes = b"application/json") -> Message:
    headers = [(b"content-type", kind), (b"x-request-id", b"r1")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def ingress(ask: Any, **server: Any) -> ASGIApp:
    return ingress_app(ask, Config().replace(server=SMALL | server).server)


class Client:
    """One request at the ingress. parts: of its body; None: it disconnects there, or waits for ever at the end"""

    def __init__(
        self, ask: Any, *parts: bytes | None, path: str = "/v1/completions", app: ASGIApp | None = None, **headers: str
    ) -> None:
        self._answer = RelayedAnswer(path, app or ingress(ask))
        self._parts = [*parts]
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.received = 0
        self.messages: list[Message] = []

    async def _receive(self) -> Message:
        self.received += 1
        if not self._parts:
            await asyncio.sleep(3600)
        body = self._parts.pop(0)
        if body is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": bool(self._parts)}

    async def _send(self, message: Message) -> None:
        self.messages.append(message)

    async def ask(self, method: str = "POST") -> tuple[int, bytes]:
        """Return status and body."""
        scope = {"type": "http", "method": method, "path": "/prefix/x", "query_string": b"a=b"}
        await self._answer({**scope, "headers": self._headers}, self._receive, self._send)
        status = next((each["status"] for each in self.messages if each["type"] == "http.response.start"), 0)
        return status, b"".join(each.get("body", b"") for each in self.messages)

    def run(self, method: str = "POST") -> tuple[int, bytes]:
        return asyncio.run(self.ask(method))


def replicas(*answers: list[Any]) -> Callable[[RelayedRequest], AsyncIterator[list[Message]]]:
    """One answer for each attempt; an exception in it is raised there."""
    left = list(answers)

    async def ask(request: RelayedRequest) -> AsyncIterator[list[Message]]:
        for each in left.pop(0):
            if isinstance(each, Exception):
                raise each
            yield [each]

    return ask


def test_the_request_arrives_whole() -> None:
    seen: list[RelayedRequest] = []

    async def ask(request: RelayedRequest) -> AsyncIterator[list[Message]]:
        seen.append(request)
        yield [started(), part(b"{}")]

    assert Client(ask, b"ab", b"cd").run() == (200, b"{}")
    assert seen == [RelayedRequest("POST", "/v1/completions", b"a=b", [], b"abcd")]


def test_a_replica_that_has_not_answered_is_replaced() -> None:
    whole = [started(), part(b"{}")]
    assert Client(replicas([ReplicaLostError()], [ReplicaLostError()], whole), b"").run() == (200, b"{}")
    status, body = Client(replicas(*[[ReplicaLostError()]] * ATTEMPTS), b"").run()
    assert status == 502 and json.loads(body)["error"]["code"] == "model_ended"


def test_a_stream_ends_with_an_error_in_the_form_of_its_api() -> None:
    lost = [started(b"text/event-stream; charset=utf-8"), part(EVENT, more=True), ReplicaLostError()]
    client = Client(replicas(lost, lost), b"", path="/v1/chat/completions")
    status, body = client.run()
    assert status == 200 and body.startswith(EVENT) and body.endswith(b"data: [DONE]\n\n")
    assert json.loads(body.split(b"\n\n")[1].removeprefix(b"data: "))["error"]["code"] == "model_ended"
    assert client.messages[-1]["more_body"] is False
    _, body = Client(replicas(lost), b"", path="/v1/messages").run()
    assert b'event: error\ndata: {"type":"error"' in body and b'"request_id":"r1"' in body


@pytest.mark.parametrize(("kind", "begun"), [(b"application/json", b'{"a'), (b"text/event-stream", b"data: {")])
def test_nothing_is_added_in_the_middle_of_a_body_or_an_event(kind: bytes, begun: bytes) -> None:
    """The connection is closed instead, because the application raises."""
    client = Client(replicas([started(kind), part(begun, more=True), ReplicaLostError()]), b"")
    with pytest.raises(Exception, match="replica that computed the answer ended"):
        client.run()
    assert [each.get("body") for each in client.messages] == [None, begun]


def test_errors_before_an_answer() -> None:
    status, body = Client(replicas([QueueFullError("full")]), b"").run()
    assert status == 429 and b"rate_limit_exceeded" in body
    status, body = Client(replicas([RuntimeError("bug")]), b"").run()
    assert status == 500 and b"bug" not in body
    for path in ("/flush_cache", "/open_session", "/metrics"):
        status, body = Client(replicas(), b"", path=path).run()
        assert status == 404 and b"one of several replicas" in body


def test_bodies_that_are_too_long_late_or_cut() -> None:
    seen: list[bytes] = []

    async def ask(request: RelayedRequest) -> AsyncIterator[list[Message]]:
        seen.append(request.body)
        yield [started(), part(b"")]

    too_long = Client(ask, b"x" * 900, b"x" * 900, b"x" * 900, b"x" * 900)
    assert too_long.run()[0] == 413 and too_long.received == 3
    assert Client(ask, b"x", None).run() == (0, b"")
    assert seen == []
    late = Client(ask, app=ingress(ask, body_timeout=0.01))
    assert late.run()[0] == 408
    upload = Client(ask, b"x" * 9000, path="/v1/files")  # no replica has a store: refused there, and not read here
    assert upload.run()[0] == 200 and upload.received == 0 and seen == [b""]


def test_a_body_without_a_key_is_not_read() -> None:
    app = ingress(replicas([started(), part(b"{}")]), api_key="secret", cors_origins=["https://page.example"])
    stranger = Client(None, b"x" * 900, app=app, origin="https://page.example")
    status, body = stranger.run()
    assert status == 401 and b"invalid_api_key" in body and stranger.received == 0
    assert (b"access-control-allow-origin", b"https://page.example") in stranger.messages[0]["headers"]
    assert Client(None, b"x", app=app, authorization="Bearer secret").run() == (200, b"{}")
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert Client(None, app=app, origin="https://page.example", **asked).run("OPTIONS")[0] == 200


def test_all_bodies_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.api.body_cost.MIN_SUM_BYTES", 0)  # else 512 MiB: the largest times 8
    answers = asyncio.Event()

    async def ask(request: RelayedRequest) -> AsyncIterator[list[Message]]:
        await answers.wait()
        yield [started(), part(b"")]

    async def ask_at_once() -> tuple[list[int], int]:
        app = ingress(ask)
        held = [asyncio.create_task(Client(ask, b"x" * 2048, app=app).ask()) for _ in range(BODIES_IN_SUM)]
        await asyncio.sleep(0.01)
        refused = await Client(ask, b"x", app=app).ask()
        answers.set()
        statuses = [status for status, _ in await asyncio.gather(*held)]
        return [*statuses, refused[0]], (await Client(ask, b"x", app=app).ask())[0]

    assert asyncio.run(ask_at_once()) == ([200] * BODIES_IN_SUM + [429], 200)


Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def messages_of(app: Application, limit: int = 100) -> list[list[Message]]:
    async def collect() -> list[list[Message]]:
        parts = run_app(app, RelayedRequest("POST", "/x", b"", [], b"body"))
        found = []
        async for messages in parts:
            found.append(messages)
            if len(found) == limit:
                break
        await parts.aclose()
        return found

    return asyncio.run(collect())


def test_an_application_runs_as_over_http() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"body" and scope["path"] == "/x" and scope["raw_path"] == b"/x"
        await send(started())
        await send(part(b"a", more=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await send(part(b"b"))

    found = messages_of(app)
    assert [len(each) for each in found] == [2, 1]  # those that wait together are one list
    assert [each.get("body") for messages in found for each in messages] == [None, b"a", b"b"]


def test_closing_ends_the_application() -> None:
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            while True:
                await send(part(b"a", more=True))
                await asyncio.sleep(0)
        finally:
            ended.append((await receive())["type"])

    assert len(messages_of(app, limit=3)) == 3 and ended == ["http.disconnect"]


def test_what_an_application_raises_is_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(started())
        raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        messages_of(app)


def test_the_id_of_a_request_is_left_to_serves_proxy() -> None:
    """Two headers of one name are one text with a comma for many clients."""
    client = Client(replicas([started(), part(b"{}")]), b"body")
    assert client.run() == (200, b"{}")
    assert client.messages[0]["headers"] == [(b"content-type", b"application/json")]


@pytest.mark.parametrize(("allowed", "status"), [("auto", 200), (["llm.example"], 403), (["other.example"], 200)])
def test_allowed_hosts_hold(allowed: Any, status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(started())

    section = Config().replace(server={"allowed_hosts": allowed}).server
    request = RelayedRequest("GET", "/v1/models", b"", [(b"host", b"other.example")], b"")

    async def status_of() -> int:
        parts = run_app(with_allowed_hosts(app, section), request)
        return (await anext(parts))[0]["status"]

    assert asyncio.run(status_of()) == status
