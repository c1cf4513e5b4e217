"""Carry a request from the ingress to an engine's replica, and the answer back.

The ingress reads the body, because the request router needs it. The replica runs the application on the request as if
it had come over HTTP. Ray is not imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.api.body_cost import LONGEST_CONTEXT, BodyLimits, BodySum
from jaxserve.api.http.browser_guard import guarded
from jaxserve.api.http.errors import ClientDisconnected, as_http_error, send_error
from jaxserve.api.http.middleware import ADMIN_PATHS, UPLOAD_PATHS, Authentication, BodyLimit
from jaxserve.api.http.sse import BegunAnswer
from jaxserve.api.keys import KeyRing
from jaxserve.config import ServerSection
from jaxserve.errors import HTTPError, ModelEndedError, NotFoundError

ATTEMPTS = 4  # most replicas that a request is sent to, one after the other, until one begins to answer

# paths that the ingress refuses, because a request would reach only one replica of several
ONE_REPLICA = ADMIN_PATHS | {"/open_session", "/close_session", "/metrics"}

Parts = AsyncGenerator[list[Message], None]
Ask = Callable[["RelayedRequest"], AsyncIterator[list[Message]]]


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """One HTTP request with its body. path: the path without the application's route prefix"""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def scope(self) -> Scope:
        """Return the request as an ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": self.headers,
            "client": None,
            "server": None,
            "state": {},
        }


class ReplicaLostError(Exception):
    """The replica ended before its answer was whole."""


def with_allowed_hosts(app: ASGIApp, section: ServerSection) -> ASGIApp:
    """Return `app` behind the check of `server.allowed_hosts`. auto allows any host: Serve's proxy has the address."""
    return app if section.allowed_hosts == "auto" else guarded(app, section)


async def run_app(app: ASGIApp, request: RelayedRequest) -> Parts:
    """Run the application on a request, and yield lists of the messages that have arrived.

    Closing the generator ends the request, as if the client had disconnected. Raises the application's errors.
    """
    messages: list[Message] = []
    changed, left = asyncio.Event(), asyncio.Event()
    bodies = iter([{"type": "http.request", "body": request.body, "more_body": False}])

    async def receive() -> Message:
        if (body := next(bodies, None)) is not None:
            return body
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.append(dict(message))
        changed.set()

    task = asyncio.ensure_future(app(request.scope, receive, send))
    task.add_done_callback(lambda _: changed.set())
    try:
        while not task.done() or messages:
            await changed.wait()
            changed.clear()
            if messages:
                given = messages.copy()
                messages.clear()
                yield given
        await task
    finally:
        left.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def ingress_app(ask: Ask, section: ServerSection) -> ASGIApp:
    """Return the application of the ingress, which checks the key and the size of a body before it reads the body.

    Replicas check again.
    ask: sends a request to a replica; raises ReplicaLostError, or an HTTPError
    """
    limits = BodyLimits.of(section, LONGEST_CONTEXT)
    app: ASGIApp = BodyLimit(
        IngressRelay(ask), limits=lambda: limits, held=BodySum([0.0]), timeout=section.body_timeout
    )
    key_ring = KeyRing(section)
    app = Authentication(app, keys=lambda: key_ring, metrics_auth=section.metrics_auth)
    if section.cors_origins:
        return CORSMiddleware(app, allow_origins=section.cors_origins, allow_methods=["*"], allow_headers=["*"])
    return app


class RelayedAnswer(Response):
    """The response of the ingress to one request. path: the path without the application's route prefix"""

    def __init__(self, path: str, app: ASGIApp) -> None:
        super().__init__()
        self._path = path
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "path": self._path, "state": {}}
        if self._path in ONE_REPLICA:
            error = NotFoundError(
                f"{self._path} is not served under Ray Serve: it would reach one of several replicas."
            )
            return await send_error(error, scope, receive, _without_id(send))
        await self._app(scope, receive, _without_id(send))


class IngressRelay:
    """ASGI application that sends a replica's answer, or an error in the form of the path's API.

    ask: see `ingress_app`
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = BegunAnswer(scope, send)
        try:
            # uploads have no limit of their own here, and every replica refuses them
            body = b"" if scope["path"].startswith(UPLOAD_PATHS) else await _read(receive)
            request = RelayedRequest(
                scope["method"], scope["path"], scope["query_string"], list(scope["headers"]), body
            )
            await self._relay(request, answer)
        except ClientDisconnected:
            return
        except Exception as error:
            await self._fail(as_http_error(error), answer, (scope, receive, send))

    async def _relay(self, request: RelayedRequest, answer: BegunAnswer) -> None:
        """Send the answer of a replica. If the replica is lost before it has answered, another one gets the request."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async for messages in self._ask(request):
                    for message in messages:
                        await answer.send(message)
                return
            except ReplicaLostError:
                if answer.has_begun or attempt == ATTEMPTS:
                    raise ModelEndedError("The replica that computed the answer ended.") from None

    async def _fail(self, error: HTTPError, answer: BegunAnswer, asgi: tuple[Scope, Receive, Send]) -> None:
        """Send the error. Raises it if nothing can be sent, so that the connection is closed."""
        if not answer.has_begun:
            await send_error(error, *asgi)
        elif not await answer.end(error):
            raise error


async def _read(receive: Receive) -> bytes:
    """Read the whole body. Raises ClientDisconnected, and the errors of `receive`."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


def _without_id(send: Send) -> Send:
    """Return a `send` that drops the header of the request's id, because Serve's proxy adds it to every answer."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [each for each in message["headers"] if each[0] != b"x-request-id"]}
        await send(message)

    return sent
