"""Write server-sent events straight to ASGI, one `send` per event; cancel work when the client disconnects.

Routes make the bytes of each event. This file writes only error events, pings and the end of the
stream (`data: [DONE]` or what the family of the path has, see errors/families.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.api.errors.families import OPENAI, ApiFamily
from jaxserve.api.errors.responses import ClientDisconnected, as_http_error
from jaxserve.api.shared.unread import ClientPace, UnreadStreams
from jaxserve.errors import HTTPError

T = TypeVar("T")

PING_SECONDS = 10.0  # without an event; Claude Code sends a request again after 300 s of silence

HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
]


def event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def named_event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it if the client disconnects. Raises ClientDisconnected in that case."""
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
    """Stream `events` (each one whole event) and end them as the API family does.

    The status line waits for the first event, so an error before it is an ordinary HTTP error. A later error is sent
    as an event. `events` is always closed, which aborts the request behind it.

    The headers pass through all middleware. The events skip the layers that only look at headers, each of which costs
    0.2 us per event.

    held_bytes: returns the bytes of outputs that wait to be sent
    unread: ends the stream if that is too much
    release: exited at the end of the stream, however it ends
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        held_bytes: Callable[[], int],
        unread: UnreadStreams,
        family: ApiFamily = OPENAI,
        release: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._events = events
        self._release = release or nullcontext()
        self._unread = unread
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
        task = self._task = asyncio.current_task()
        first = await anext(self._events, b"")
        pings = None
        try:
            headers = [(b"content-type", self._family.content_type), *HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send_body({"type": "http.response.body", "body": first, "more_body": True})
            pings = asyncio.create_task(self._ping(send_body)) if self._family.ping else None
            async for data in self._events:
                self._is_idle = False
                await send_body({"type": "http.response.body", "body": data, "more_body": True})
        except asyncio.CancelledError:
            if self._end is None or task is None:
                raise
            task.uncancel()
            await self._events.aclose()
            await self._send_error(self._end, send_body)
        except Exception as error:
            await self._send_error(as_http_error(error), send_body)
        finally:
            if pings is not None:
                pings.cancel()
        await send_body({"type": "http.response.body", "body": self._family.done, "more_body": False})

    async def _ping(self, send_body: Send) -> None:
        """Send a ping after each PING_SECONDS without an event."""
        while True:
            self._is_idle = True
            await asyncio.sleep(PING_SECONDS)
            if self._is_idle:
                await send_body({"type": "http.response.body", "body": self._family.ping, "more_body": True})

    async def _send_error(self, error: HTTPError, send_body: Send) -> None:
        data = self._family.error_event(error, self._request_id)
        await send_body({"type": "http.response.body", "body": data, "more_body": True})
