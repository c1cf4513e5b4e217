"""Write every error in the form of the path's API, whether jaxserve, pydantic, the router or a bug raised it.

The path of a request decides its API family. `ApiFamily` is one table for all APIs: how each writes errors, pings a
stream and ends it. Middleware outside the router uses it too, and so do streams that have begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from jaxserve.errors import (
    HTTPError,
    InvalidValueError,
    NotReadyError,
    PayloadTooLargeError,
    QueueFullError,
    RequestError,
    ServerError,
    UnsupportedParameterError,
)

logger = logging.getLogger(__name__)

NDJSON = b"application/x-ndjson"
MAX_MESSAGE_CHARS = 1000  # longest message; it may quote the client's input, so never send a large one back
ANTHROPIC_PREFIX = "/v1/messages"
RESPONSES_PREFIX = "/v1/responses"
OLLAMA_PREFIX = "/api/"


@dataclass(frozen=True)
class ApiFamily:
    """The form of an API's errors and streams.

    status: returns the HTTP status of an error
    body: returns the JSON of an error, given the error and the request's id
    error_name: name of a stream's error event; empty: events have no names
    done: the end of a stream
    ping: sent while a stream has no events; empty: no pings
    content_type: of a stream: server-sent events, or one JSON object a line
    event_body: returns the data of an error event; None: `body` does
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
    """Return 529 for a full queue. Agents send such a request again, but give up after some kinds of 429."""
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
    """Return 503 for a full queue. Codex sends such a request again, but gives up after a 429."""
    return 503 if isinstance(error, QueueFullError) else error.status


def _responses_body(error: HTTPError, request_id: str) -> dict[str, Any]:
    """Return OpenAI's body, with the fields of chat renamed to the fields of Responses."""
    inner = _openai_body(error, request_id)["error"]
    if isinstance(error, UnsupportedParameterError):  # it names a field of the body
        return {"error": inner}
    return {"error": inner | {"param": _RESPONSES_PARAMS.get(inner["param"], inner["param"])}}


def _responses_event(error: HTTPError, request_id: str) -> dict[str, Any]:
    """Build the data of an error event in both forms that clients read: flat, and below `error`."""
    inner = _responses_body(error, request_id)["error"]
    return {"type": "error", **{key: inner[key] for key in ("code", "message", "param")}, "error": inner}


def _ollama_body(error: HTTPError, request_id: str) -> dict[str, Any]:
    return {"error": _naming(error)}


_COMMENT = b": ping\n\n"  # every reader of server-sent events skips a comment
OPENAI = ApiFamily(lambda error: error.status, _openai_body, done=b"data: [DONE]\n\n", ping=_COMMENT)
ANTHROPIC = ApiFamily(
    _anthropic_status, _anthropic_body, error_name="error", ping=b'event: ping\ndata: {"type":"ping"}\n\n'
)
RESPONSES = ApiFamily(
    _responses_status,
    _responses_body,
    error_name="error",
    done=OPENAI.done,
    ping=_COMMENT,
    event_body=_responses_event,
)
OLLAMA = ApiFamily(lambda error: error.status, _ollama_body, content_type=NDJSON)

# an OpenAI client with a wrong base URL asks for paths below /api/v1
_BY_PREFIX = {ANTHROPIC_PREFIX: ANTHROPIC, RESPONSES_PREFIX: RESPONSES, "/api/v1/": OPENAI, OLLAMA_PREFIX: OLLAMA}


def family_of(path: str) -> ApiFamily:
    return next((family for prefix, family in _BY_PREFIX.items() if path.startswith(prefix)), OPENAI)


_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


def _allowed(request: Request) -> str:
    """Return the header Allow: the methods of every route of the path, and HEAD, which is answered wherever GET is."""
    scopes = [{**request.scope, "method": method} for method in _METHODS]
    found = {
        scope["method"]
        for scope in scopes
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    }
    return ", ".join(sorted(found | ({"HEAD"} if "GET" in found else set())))


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


class ClientDisconnected(Exception):
    """The client disconnected before the response was complete. Nothing more is sent, and the log shows status 499."""


_FAILS_AGAIN = frozenset({400, 401, 403, 404, 405, 413, 415})


def error_response(error: HTTPError, scope: Scope) -> Response:
    """Build the response of an error in the form of the path's API.

    `Retry-After` is in whole seconds, rounded up. `x-should-retry: false` tells the SDKs of OpenAI and Anthropic that
    the same request would fail again.
    """
    family = family_of(scope["path"])
    request_id = scope.get("state", {}).get("request_id", "")
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, -int(-error.retry_after // 1)))
    elif family.status(error) in _FAILS_AGAIN:
        headers["x-should-retry"] = "false"
    body = family.error_body(error, request_id)
    return Response(body, family.status(error), headers, media_type="application/json")


async def send_error(error: HTTPError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send `error` as the response, from inside a middleware."""
    await error_response(error, scope)(scope, receive, send)


def internal_error(error: BaseException) -> HTTPError:
    """Build the error that a client sees for a bug. Details are only logged."""
    logger.error("unexpected error in a request", exc_info=error)
    return ServerError("The server had an internal error. Its log has the details.", code="internal_error")


def as_http_error(error: BaseException) -> HTTPError:
    return error if isinstance(error, HTTPError) else internal_error(error)


MAX_NAME = 80  # characters of a field name from the body that an error repeats


def from_validation(error: ValidationError, root: Any) -> RequestError:
    """Build one error for a body that failed validation.

    `root` is the parsed body. Walking it tells field names from names of union branches. If a union gives several
    errors, the deepest is used; equally deep errors are joined.
    """
    details = error.errors(include_url=False, include_context=False, include_input=False)
    found = [(path_in(root, detail), detail) for detail in details]
    deepest = max(len(path) for path, _ in found)
    path, first = next(item for item in found if len(item[0]) == deepest)
    param = ".".join(str(part)[:MAX_NAME] for part in path) or None
    reasons = list(dict.fromkeys(detail["msg"] for other, detail in found if other == path))
    return InvalidValueError(f"{param or 'body'}: {' or '.join(reasons[:4])}", param=param, code=_code(first["type"]))


def path_in(root: Any, detail: ErrorDetails) -> list[str | int]:
    """Return the keys that lead from a body to what was found wrong, without the names of union branches."""
    path: list[str | int] = []
    node, last = root, len(detail["loc"]) - 1
    for place, key in enumerate(detail["loc"]):
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and isinstance(key, int) and key < len(node):
            node = node[key]
        elif not (place == last and detail["type"] == "missing"):
            continue
        path.append(key)
    return path


def _code(kind: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"


def install_error_handlers(app: FastAPI) -> None:
    """Replace FastAPI's own error bodies on every route."""

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPError)
        return error_response(error, request.scope)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return error_response(InvalidValueError(f"{param or 'request'}: {first['msg']}", param=param), request.scope)

    async def on_router(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_from_router(request, error), request.scope)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["allow"] = _allowed(request)
        return response

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client is gone; the status only shows in the access log

    app.add_exception_handler(HTTPError, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_router)
    app.add_exception_handler(ClientDisconnected, on_disconnect)


def _from_router(request: Request, error: HTTPException) -> HTTPError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        nearest = _nearest_path(request)
        if nearest is None:
            result: HTTPError = _NotFoundRoute(f"There is no route {where}.")
        else:
            result = _NotFoundRoute(
                f"There is no route {where}. Did you mean {nearest}? The base URL of an OpenAI client ends with /v1, "
                "that of other clients has no path."
            )
    elif error.status_code == 405:
        result = MethodNotAllowedError(f"{where}: the method is not allowed here.")
    else:
        kind = _ROUTER_ERRORS.get(error.status_code, RequestError if error.status_code < 500 else ServerError)
        result = kind(str(error.detail))
    return result


MAX_SEGMENTS = 12  # segments of a path that is compared with the routes


def _nearest_path(request: Request) -> str | None:
    """Return the known path that is a suffix of this one, with or without /v1: a client's base URL may be wrong.

    A path below a route of Anthropic never suggests a route of another API: /v1/messages/batches is not /v1/batches.
    """
    segments = [each for each in map(str.strip, request.url.path.split("/")) if each]
    if len(segments) > MAX_SEGMENTS:
        return None
    for start in range(len(segments)):
        rest = "/" + "/".join(segments[start:])
        for path in (f"/v1{rest}", rest):
            if family_of(request.url.path) is ANTHROPIC is not family_of(path):
                continue
            if any(route.matches({**request.scope, "path": path})[0] is Match.FULL for route in request.app.routes):
                return path
    return None


class _NotFoundRoute(RequestError):
    status = 404
    code = "not_found"


_ROUTER_ERRORS: dict[int, type[HTTPError]] = {413: PayloadTooLargeError}
