"""Write every error in the form of the path's API, whether raised by jaxserve, by pydantic, by the router, or by a bug.

Also used outside the router (middleware) and for streams that have begun.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from jaxserve.api.errors.families import ANTHROPIC, family_of
from jaxserve.errors import HTTPError, InvalidValueError, PayloadTooLargeError, RequestError, ServerError

logger = logging.getLogger(__name__)


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


class ClientDisconnected(Exception):
    """The client disconnected before the response was complete. Nothing more is sent; the log shows status 499."""


_FAILS_AGAIN = frozenset({400, 401, 403, 404, 405, 413, 415})


def error_response(error: HTTPError, scope: Scope) -> Response:
    """Build the response of an error in the form of the path's API.

    `Retry-After` is in whole seconds, rounded up. `x-should-retry: false` tells the SDKs of OpenAI and Anthropic, and
    so the agents on them, that the same request would fail again.
    """
    family, request_id = family_of(scope["path"]), scope.get("state", {}).get("request_id", "")
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

    `root` is the parsed body. Walking it distinguishes field names from names of union branches. If a union gives
    several errors, the deepest is used; equally deep ones are joined.
    """
    details = error.errors(include_url=False, include_context=False, include_input=False)
    found = [(_path(detail, root), detail) for detail in details]
    deepest = max(len(path) for path, _ in found)
    path, first = next(item for item in found if len(item[0]) == deepest)
    param = ".".join(str(part)[:MAX_NAME] for part in path) or None
    reasons = list(dict.fromkeys(detail["msg"] for other, detail in found if other == path))
    return InvalidValueError(f"{param or 'body'}: {' or '.join(reasons[:4])}", param=param, code=_code(first["type"]))


def _path(detail: ErrorDetails, root: Any) -> list[str | int]:
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

    A path below one of Anthropic's routes has none of another API: /v1/messages/batches is not /v1/batches.
    """
    segments = request.url.path.split("/")[1:]
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
