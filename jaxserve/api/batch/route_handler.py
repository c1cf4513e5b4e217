"""Run a batch request by calling the server's own route function in process.

A batch request and an online request share all code from the route on, so every check, limit and field is the same. A
new route is usable in batches once it is listed in BATCH_ENDPOINTS of api/app.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from jaxserve.api.batch.batch_request import Answered, RequestHandler
from jaxserve.api.protocol.limits import Priority
from jaxserve.api.shared.body_cost import is_large
from jaxserve.api.shared.keys import Caller, set_caller
from jaxserve.api.shared.state import ServerState
from jaxserve.types.sampling import BACKGROUND_PRIORITY

Endpoint = Callable[[Request], Awaitable[Response]]

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OWN = TypeAdapter(Priority | None, config=ConfigDict(strict=True))

# The priority of a batch request is clamped to this range around the middle of the engine's background priorities.
OWN_PRIORITIES = 2**29 - 1
BATCH_PRIORITY = BACKGROUND_PRIORITY + OWN_PRIORITIES


def route_handlers(app: FastAPI, endpoints: Mapping[str, Endpoint]) -> dict[str, RequestHandler]:
    """Return a handler for each route of `app` that batch requests may name, by path."""
    return {path: RouteHandler(app, path, endpoint) for path, endpoint in endpoints.items()}


class RouteHandler:
    """Call the function of one POST route without the middleware. The batch checks the API key and the engine's
    readiness.

    body: JSON. Returns the status and the JSON body of the answer. Raises the HTTPErrors of the route.
    """

    def __init__(self, app: FastAPI, path: str, endpoint: Endpoint) -> None:
        self._app = app
        self._path = path
        self._endpoint = endpoint

    async def __call__(self, body: bytes, request_id: str, owner: str) -> Answered:
        state: ServerState = self._app.state.server
        await state.load_template()
        limits = state.body_limits()

        def work() -> bytes:
            limits.check_json(body, self._path)
            return with_batch_priority(body)

        prepared = await state.body_work.run(work, len(body)) if is_large(body) else work()
        request = Request(self._scope(request_id, owner), _one_body(prepared))
        response = await self._endpoint(request)
        return Answered(response.status_code, bytes(response.body))

    def _scope(self, request_id: str, owner: str) -> dict[str, Any]:
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "app": self._app,
            "state": {"request_id": request_id},
        }
        set_caller(scope, Caller(owner, is_stored=True))
        return scope


def _one_body(body: bytes) -> Callable[[], Awaitable[Message]]:
    """Return a `receive` that sends one body, then blocks: the client of a batch request leaves only by cancelling the
    call.
    """
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.get_running_loop().create_future()
        return messages.pop()

    return receive


def with_batch_priority(body: bytes) -> bytes:
    """Return the body with its priority moved into the background range.

    The other fields keep their bytes, so that numbers keep all their digits. A body that the route refuses, for its
    priority or because it is not JSON, is left as it is.
    """
    try:
        fields = _FIELDS.decode(body)
        own = _OWN.validate_json(bytes(fields.get("priority", b"null")))
    except (msgspec.DecodeError, ValidationError, RecursionError):
        return body
    return msgspec.json.encode(fields | {"priority": batch_priority(own or 0)})


def batch_priority(own: int) -> int:
    """Return a client's priority moved into the background range."""
    return BATCH_PRIORITY + max(-OWN_PRIORITIES, min(own, OWN_PRIORITIES))
