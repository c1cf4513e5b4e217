"""A line of a batch, run by the server's own route, called in process.

A line takes the same way as an online request from the router on, so that every check, limit and field is the same by
construction, and a new route needs one word to be usable in batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.types import Message

from jaxserve.api.batch.handlers import LineAnswer, LineHandler

# Added to a line's own priority (lower runs earlier): after every online request of a sane priority.
BATCH_PRIORITY = 2**30


def route_handlers(app: FastAPI, endpoints: Iterable[str]) -> dict[str, LineHandler]:
    """The routes of `app` that lines may name."""
    return {endpoint: RouteHandler(app, endpoint) for endpoint in endpoints}


class RouteHandler:
    """Calls one POST route of an application below its middleware: keys and readiness are the batch's own matter."""

    def __init__(self, app: FastAPI, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, body: bytes, request_id: str) -> LineAnswer:
        call = _Call(with_batch_priority(body))
        await self._app.router(self._scope(request_id), call.receive, call.send)
        return LineAnswer(call.status, b"".join(call.sent))

    def _scope(self, request_id: str) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"batch")],
            "client": None,
            "server": None,
            "app": self._app,
            "state": {"request_id": request_id},
        }


class _Call:
    """The two ends of one in-process call."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.sent: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            await _never()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.sent.append(message.get("body", b""))


async def _never() -> None:
    """A client that waits for its answer: it disconnects only by the cancelling of the whole call."""
    await asyncio.get_running_loop().create_future()


def with_batch_priority(body: bytes) -> bytes:
    """The body with its priority behind all online ones; a priority that is no whole number is left to the route."""
    fields = orjson.loads(body)
    own = fields.get("priority") or 0
    if type(own) is not int:
        return body
    fields["priority"] = BATCH_PRIORITY + max(-BATCH_PRIORITY + 1, min(own, BATCH_PRIORITY - 1))
    return orjson.dumps(fields)
