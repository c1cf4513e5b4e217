"""The API families: how each writes errors and ends a stream. The path of a request decides its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from jaxserve.errors import HTTPError, NotReadyError, QueueFullError

NDJSON = b"application/x-ndjson"
MAX_MESSAGE_CHARS = 1000  # characters; a message may quote the client's input, so never send a large one back
ANTHROPIC_PREFIX = "/v1/messages"
RESPONSES_PREFIX = "/v1/responses"
OLLAMA_PREFIX = "/api/"


@dataclass(frozen=True)
class ApiFamily:
    """The form of errors and streams.

    status: HTTP status of an error. body: its JSON, given the error and the request's id
    error_name: name of a stream's error event; empty: events have no names
    done: the end of a stream. ping: sent while a stream has no events; empty: no pings
    content_type: of a stream. Server-sent events, or a JSON object a line
    event_body: the data of an error event, if it is not the body
    """

    status: Callable[[HTTPError], int]
    body: Callable[[HTTPError, str], dict[str, Any]]
    error_name: str = ""
    done: bytes = b""
    ping: bytes = b""
    content_type: bytes = b"text/event-stream; charset=utf-8"
    event_body: Callable[[HTTPError, str], dict[str, Any]] | None = None

    def error_body(self, error: HTTPError, request_id: str = "") -> bytes:
        return orjson.dumps(self.body(error, request_id))

    def error_event(self, error: HTTPError, request_id: str = "") -> bytes:
        if self.content_type == NDJSON:
            return self.error_body(error, request_id) + b"\n"
        name = f"event: {self.error_name}\n".encode() if self.error_name else b""
        data = (self.event_body or self.body)(error, request_id)
        return b"%bdata: %b\n\n" % (name, orjson.dumps(data))


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
    inner = {"type": kind, "message": _naming(error)} | ({"details": error.details} if error.details else {})
    return {"type": "error", "error": inner, "request_id": request_id}


def _naming(error: HTTPError) -> str:
    """Return the message for a form that has no field for the parameter."""
    named = error.param is None or error.param in error.message
    return _short(error.message if named else f"{error.param}: {error.message}")


_RESPONSES_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens"}


def _responses_status(error: HTTPError) -> int:
    """Return 503 for a full queue: Codex sends such a request again, and ends at a 429."""
    return 503 if isinstance(error, QueueFullError) else error.status


def _responses_body(error: HTTPError, request_id: str) -> dict[str, Any]:
    """Return OpenAI's body. What is common with chat names its fields: those of Responses have other names."""
    inner = _openai_body(error, request_id)["error"]
    return {"error": inner | {"param": _RESPONSES_PARAMS.get(inner["param"], inner["param"])}}


def _responses_event(error: HTTPError, request_id: str) -> dict[str, Any]:
    """Build the data of an error event in both forms that clients read: flat, and below `error`."""
    inner = _responses_body(error, request_id)["error"]
    return {"type": "error", **{key: inner[key] for key in ("code", "message", "param")}, "error": inner}


def _ollama_body(error: HTTPError, request_id: str) -> dict[str, Any]:
    return {"error": _naming(error)}


_COMMENT = b": ping\n\n"  # which every reader of server-sent events skips
OPENAI = ApiFamily(lambda error: error.status, _openai_body, done=b"data: [DONE]\n\n", ping=_COMMENT)
ANTHROPIC = ApiFamily(
    _anthropic_status, _anthropic_body, error_name="error", ping=b'event: ping\ndata: {"type":"ping"}\n\n'
)
RESPONSES = ApiFamily(
    *(_responses_status, _responses_body, "error"), done=OPENAI.done, ping=_COMMENT, event_body=_responses_event
)
OLLAMA = ApiFamily(lambda error: error.status, _ollama_body, content_type=NDJSON)

# /api/v1 is what an OpenAI client with a wrong base URL asks for
_BY_PREFIX = {ANTHROPIC_PREFIX: ANTHROPIC, RESPONSES_PREFIX: RESPONSES, "/api/v1/": OPENAI, OLLAMA_PREFIX: OLLAMA}


def family_of(path: str) -> ApiFamily:
    return next((family for prefix, family in _BY_PREFIX.items() if path.startswith(prefix)), OPENAI)
