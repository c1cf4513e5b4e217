"""Write server-sent events straight to ASGI, one `send` per event, and cancel work when the client disconnects.

Routes make the bytes of each event. This file writes only error events, pings and the end of the stream, in the form
of the path's API family (errors.py). `BegunAnswer` passes on the answer of another process, and ends it if that process
ends before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxserve.api.http.errors import NDJSON, OPENAI, ApiFamily, ClientDisconnected, as_http_error, family_of
from jaxserve.api.state import ServerState
from jaxserve.api.unread_streams import ClientPace
from jaxserve.errors import HTTPError

T = TypeVar("T")

START_SECONDS = 1.0  # a stream begins after this time even without an event: proxies give up on silent servers

HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
]


def event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def named_event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. If the client disconnects, cancel it and raise ClientDisconnected."""
    return await _race(work, request.receive)


async def _race(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Stream `events`, each one whole event, and end the stream as the API family does.

    The status line waits START_SECONDS for the first event, so that an error within this time is an ordinary HTTP
    error. A later error is sent as an event. While there are no events, the family's ping is sent every
    `server.ping_interval` seconds. `events` is always closed, which aborts the request behind it.

    The headers pass through all middleware. The events skip the layers that only look at headers, each of which costs
    0.2 us per event.

    held_bytes: returns the bytes of outputs that wait to be sent; if they are too many, `state.unread` ends the stream
    release: exited at the end of the stream, however it ends
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        held_bytes: Callable[[], int],
        state: ServerState,
        family: ApiFamily = OPENAI,
        release: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._events = events
        self._release = release or nullcontext()
        self._unread = state.unread
        self._ping_interval = state.config.server.ping_interval
        self._family = family
        self._pace = ClientPace()
        self._task: asyncio.Task[None] | None = None
        self._end: HTTPError | None = None
        self._request_id = ""
        self._is_idle = True  # no event since the last look of the ping task
        self.held_bytes = held_bytes
        self.background = None
        self.status_code = 200

    @property
    def paused(self) -> bool:
        return self._pace.paused

    def end_with(self, error: HTTPError) -> None:
        """Send an error event and nothing after it, and stop making events."""
        self._end = error
        if self._task is not None:
            self._task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        self._pace = state.get("pace", self._pace)
        self._request_id = state.get("request_id", "")
        self._unread.add(self)
        with self._release:
            try:
                await _race(self._stream(send, state.get("send_body", send)), receive)
            except ClientDisconnected:
                return
            finally:
                self._unread.remove(self)
                await self._events.aclose()

    async def _stream(self, send: Send, send_body: Send) -> None:
        first = asyncio.ensure_future(anext(self._events, b""))
        try:
            await asyncio.wait({first}, timeout=START_SECONDS)
            if first.done():
                await first
            await self._send_events(first, send, send_body)
        finally:
            await _cancelled(first)

    async def _send_events(self, first: asyncio.Future[bytes], send: Send, send_body: Send) -> None:
        task = self._task = asyncio.current_task()
        pings = None
        try:
            headers = [(b"content-type", self._family.content_type), *HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if self._family.ping and self._ping_interval is not None:
                pings = asyncio.create_task(self._ping(self._ping_interval, send_body))
            await send_body({"type": "http.response.body", "body": await first, "more_body": True})
            async for data in self._events:
                self._is_idle = False
                await send_body({"type": "http.response.body", "body": data, "more_body": True})
        except asyncio.CancelledError:
            if self._end is None or task is None:
                raise
            task.uncancel()
            await _cancelled(first)
            await self._events.aclose()
            await self._send_error(self._end, send_body)
        except Exception as error:
            await self._send_error(as_http_error(error), send_body)
        finally:
            if pings is not None:
                pings.cancel()
        await send_body({"type": "http.response.body", "body": self._family.done, "more_body": False})

    async def _ping(self, interval: float, send_body: Send) -> None:
        """Send a ping after each `interval` seconds without an event."""
        while True:
            self._is_idle = True
            await asyncio.sleep(interval)
            if self._is_idle:
                await send_body({"type": "http.response.body", "body": self._family.ping, "more_body": True})

    async def _send_error(self, error: HTTPError, send_body: Send) -> None:
        data = self._family.error_event(error, self._request_id)
        await send_body({"type": "http.response.body", "body": data, "more_body": True})


async def _cancelled(future: asyncio.Future[bytes]) -> None:
    """Cancel a future and wait until it has ended."""
    future.cancel()
    await asyncio.gather(future, return_exceptions=True)


class BegunAnswer:
    """Pass on ASGI messages, and keep track of how to end their stream. The scope's state may have a request_id."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._stream_end = b""  # the end of each event; empty: the answer is not a stream
        self._last = b""
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Send one message."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = dict(message["headers"])
            kind = headers.get(b"content-type", b"")
            self._stream_end = b"\n\n" if kind.startswith(b"text/event-stream") else b"\n" if kind == NDJSON else b""
            self._scope["state"].setdefault("request_id", headers.get(b"x-request-id", b"").decode("latin-1"))
        elif self._stream_end:
            self._last = (self._last + message.get("body", b""))[-2:]
        await self._send(message)

    async def end(self, error: HTTPError) -> bool:
        """Send the error as the last event of a stream, and return whether this was possible.

        It is not possible in the middle of an event or of a whole body. The caller then closes the connection.
        """
        if not self._stream_end or (self._last and not self._last.endswith(self._stream_end)):
            return False
        family = family_of(self._scope["path"])
        event = family.error_event(error, self._scope["state"].get("request_id", ""))
        await self._send({"type": "http.response.body", "body": event + family.done, "more_body": False})
        return True
