"""The API families: how each writes errors and ends a stream. The path of a request decides its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from jaxserve.errors import HTTPError, NotReadyError, QueueFullError

MAX_MESSAGE_CHARS = 1000  # characters; a message may quote the client's input, so never send a large one back
ANTHROPIC_PREFIX = "/v1/messages"


@dataclass(frozen=True)
class ApiFamily:
    """The form of errors and streams.

    status: HTTP status of an error. body: its JSON, given the error and the request's id
    error_name: name of a stream's error event; empty: events have no names
    done: the end of a stream. ping: sent while a stream has no events; empty: no pings
    """

    status: Callable[[HTTPError], int]
    body: Callable[[HTTPError, str], dict[str, Any]]
    error_name: str = ""
    done: bytes = b""
    ping: bytes = b""

    def error_body(self, error: HTTPError, request_id: str = "") -> bytes:
        return orjson.dumps(self.body(error, request_id))

    def error_event(self, error: HTTPError, request_id: str = "") -> bytes:
        name = f"event: {self.error_name}\n".encode() if self.error_name else b""
        return b"%bdata: %b\n\n" % (name, self.error_body(error, request_id))


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + " ..."


def _openai_body(error: HTTPError, request_id: str) -> dict[str, Any]:
    body = error.body()
    return {"error": body["error"] | {"message": _short(error.message)}}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _anthropic_status(error: HTTPError) -> int:
    """Return 529 for a full queue: agents send such a request again, and end at a 429 of some kinds."""
    return 529 if isinstance(error, QueueFullError) else error.status


def _anthropic_body(error: HTTPError, request_id: str) -> dict[str, Any]:
    status = _anthropic_status(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if status == 503 and not isinstance(error, NotReadyError):
        kind = "api_error"
    # this form has no field for the parameter, so the message names it
    named = error.param is None or error.param in error.message
    message = error.message if named else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": _short(message)}, "request_id": request_id}


OPENAI = ApiFamily(lambda error: error.status, _openai_body, done=b"data: [DONE]\n\n")
ANTHROPIC = ApiFamily(
    _anthropic_status, _anthropic_body, error_name="error", ping=b'event: ping\ndata: {"type":"ping"}\n\n'
)


def family_of(path: str) -> ApiFamily:
    return ANTHROPIC if path.startswith(ANTHROPIC_PREFIX) else OPENAI
