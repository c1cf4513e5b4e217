"""Run one batch request and build its line of the output or error file.

A full queue or an engine that is not ready is waited for as long as the batch lives. Other server errors are retried a
few times. Any other error fails this request alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import orjson

from jaxserve.api.batch.failure_log import FailureLog
from jaxserve.errors import EngineDeadError, HTTPError, NotReadyError, QueueFullError, ServerError
from jaxserve.store import BatchLine, LineResult, TokenCounts

MAX_ATTEMPTS = 3  # attempts at a request that meets server errors
READY_POLL = 0.25  # seconds between checks whether the engine is ready
MAX_WAIT = 5.0  # maximum seconds between two attempts while the queue is full


class Answered(NamedTuple):
    """The answer of a batch request. `body` is JSON without newlines."""

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
    """Run the requests of one batch, for one endpoint and API key. `ready` returns whether the engine accepts
    requests.
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
