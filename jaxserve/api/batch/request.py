"""Run one batch request and build its line of the output or error file.

While the queue is full or the engine is not ready, the request waits as long as the batch lives. Other server errors
are retried a few times. Any other error fails this request alone.

`RouteHandler` calls the server's own route function in process. A batch request and an online request therefore share
all code from the route on, so every check, limit and field is the same. A new route is usable in batches once it is
listed in BATCH_ENDPOINTS of api/app.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import orjson
from fastapi import FastAPI
from pydantic import ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from jaxserve.api.batch.failure_log import FailureLog
from jaxserve.api.body_cost import is_large
from jaxserve.api.keys import Caller, set_caller
from jaxserve.api.ranges import Priority
from jaxserve.api.state import ServerState
from jaxserve.errors import EngineDeadError, HTTPError, NotReadyError, QueueFullError, ServerError
from jaxserve.store import BatchLine, LineResult, TokenCounts
from jaxserve.types.sampling import BACKGROUND_PRIORITY

MAX_ATTEMPTS = 3  # attempts at a request that meets server errors
READY_POLL = 0.25  # seconds between checks whether the engine is ready
MAX_WAIT = 5.0  # maximum seconds between two attempts while the queue is full


class Answered(NamedTuple):
    """The answer to a batch request. `body` is JSON without newlines."""

    status: int
    body: bytes


class RequestHandler(Protocol):
    """Run one request for the API key `owner`. Cancelling the call also aborts it in the engine.

    Raises HTTPError if an online client would be answered with an error.
    """

    async def __call__(self, body: bytes, request_id: str, owner: str) -> Answered: ...


Handlers = Mapping[str, RequestHandler]  # handler of each endpoint, named with the /v1 prefix


@dataclass(frozen=True, slots=True)
class RequestRunner:
    """Run the requests of one batch, for one endpoint and API key.

    ready: returns whether the engine accepts requests
    """

    handler: RequestHandler
    ready: Callable[[], bool]
    failures: FailureLog
    retry_delay: float = 1.0  # seconds before the second attempt; doubles each time
    owner: str = ""

    async def run(self, number: int, line: BatchLine) -> LineResult:
        """Return the outcome of a batch request that passed validation. Raises only if cancelled."""
        request_id = f"req-{secrets.token_hex(16)}"
        answer = await self._answer(bytes(line.body), request_id)
        succeeded = answer.status < 400
        usage = read_usage(answer.body) if succeeded else TokenCounts()
        return LineResult(number, succeeded, response_line(line.custom_id, request_id, answer), usage)

    async def _answer(self, body: bytes, request_id: str) -> Answered:
        attempt = 1
        while True:
            await self._until_ready()
            try:
                return await self.handler(body, request_id, self.owner)
            except (QueueFullError, NotReadyError) as error:
                await asyncio.sleep(min(error.retry_after or 1.0, MAX_WAIT))
            except Exception as error:
                failure = _as_failure(error)
                if failure.status >= 500:
                    self.failures.note(error)
                if failure.status < 500 or attempt == MAX_ATTEMPTS:
                    return Answered(failure.status, orjson.dumps(failure.body()))
                await asyncio.sleep(self.retry_delay * 2 ** (attempt - 1))
                attempt += 1

    async def _until_ready(self) -> None:
        while not self.ready():
            await asyncio.sleep(READY_POLL)


def _as_failure(error: Exception) -> HTTPError:
    if isinstance(error, HTTPError):
        return error
    return ServerError("The server had an internal error. Its log has the details.", code="internal_error")


def engine_ready(check_ready: Callable[[], None]) -> bool:
    """Return whether `check_ready` passes. A dead engine counts as not ready, because it may be restarted."""
    try:
        check_ready()
    except (NotReadyError, EngineDeadError):
        return False
    return True


def response_line(custom_id: str, request_id: str, answer: Answered) -> bytes:
    """Build the line of a request that was run, whatever its status."""
    body = answer.body if b"\n" not in answer.body else orjson.dumps(orjson.loads(answer.body))
    response = orjson.Fragment(
        b'{"status_code":%d,"request_id":%b,"body":%b}' % (answer.status, orjson.dumps(request_id), body)
    )
    return _line(custom_id, response, None)


def unexecuted_line(custom_id: str, reason: tuple[str, str]) -> bytes:
    """Build the line of a request that never ran. reason: code and message."""
    return _line(custom_id, None, {"code": reason[0], "message": reason[1]})


def _line(custom_id: str, response: orjson.Fragment | None, error: dict[str, str] | None) -> bytes:
    line_id = f"batch_req_{secrets.token_hex(12)}"
    return orjson.dumps({"id": line_id, "custom_id": custom_id, "response": response, "error": error})


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The token counts of an answer, under the field names of every route."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _InputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


def read_usage(body: bytes) -> TokenCounts:
    """Read the token counts from an answer."""
    usage = _ANSWER.decode(body).usage or _Usage()
    cached = usage.prompt_tokens_details or usage.input_tokens_details or _InputDetails()
    reasoning = usage.completion_tokens_details or usage.output_tokens_details or _OutputDetails()
    return TokenCounts(
        input_tokens=usage.prompt_tokens or usage.input_tokens or 0,
        cached_tokens=cached.cached_tokens or 0,
        output_tokens=usage.completion_tokens or usage.output_tokens or 0,
        reasoning_tokens=reasoning.reasoning_tokens or 0,
    )


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
    """Call the function of one POST route without the middleware.

    The batch has checked the API key and the engine's readiness. A call takes the JSON body of the request and returns
    the status and the JSON body of the answer. It raises the HTTPErrors of the route.
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
    """Return a `receive` that gives one body and then blocks, because only cancelling ends a batch request early."""
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
