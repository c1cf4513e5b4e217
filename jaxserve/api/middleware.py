"""Pure ASGI middleware: request ids and last-resort errors, keys, readiness, the limit on bodies.

No BaseHTTPMiddleware: it triples the cost of every streamed chunk.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.api.engine_protocol import EngineProtocol
from jaxserve.api.errors import ClientDisconnected, as_http_error, send_error
from jaxserve.config import ServerSection
from jaxserve.errors import AuthenticationError, HTTPError, PayloadTooLargeError, PermissionDeniedError
from jaxserve.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/live"})  # no key, any phase
ADMIN_PATHS = frozenset({"/flush_cache", "/abort_request"})
UPLOAD_PATHS = ("/v1/files", "/files")  # have their own, larger limit

logger = logging.getLogger(__name__)

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestContext:
    """Outermost: gives each request an id, counts and logs it, and turns what nobody caught into a 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log_requests: bool = False) -> None:
        self.app = app
        self.metrics = metrics
        self.log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = time.perf_counter()
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["send_body"] = send  # nothing between here and a route looks at the body: see sse.EventStream
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                milliseconds = b"%d" % ((time.perf_counter() - started) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("latin-1")),
                    (b"openai-processing-ms", milliseconds),
                ]
            await send(message)

        try:
            await self.app(scope, receive, tagged)
        except ClientDisconnected:
            status = status or 499
        except Exception as error:
            http_error = as_http_error(error)
            if status == 0:
                await send_error(http_error, scope, receive, tagged)
        finally:
            self.metrics.count_response(scope, status)
            if self.log_requests:
                seconds = time.perf_counter() - started
                logger.info("%s %s %d %.3f s %s", scope["method"], scope["path"], status, seconds, request_id)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


class Authentication:
    """Bearer keys. The admin key opens everything; without one the admin routes are off."""

    def __init__(self, app: ASGIApp, config: ServerSection) -> None:
        self.app = app
        self._key = _digest(config.api_key)
        self._admin_key = _digest(config.admin_api_key)
        self._open = OPEN_PATHS | {"/"} | (set() if config.metrics_auth else {"/metrics"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refusal(scope)
            if error is not None:
                return await send_error(error, scope, receive, send)
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> HTTPError | None:
        path = scope["path"]
        if path in ADMIN_PATHS:
            if self._admin_key is None:
                return PermissionDeniedError("Admin routes are off: server.admin_api_key is not set.")
            return None if _matches(scope, self._admin_key) else _wrong_key()
        if self._key is None or path in self._open:
            return None
        known = _matches(scope, self._key) or (self._admin_key is not None and _matches(scope, self._admin_key))
        return None if known else _wrong_key()


def _digest(key: str | None) -> bytes | None:
    return None if key is None else hashlib.sha256(key.encode()).digest()


def _matches(scope: Scope, expected: bytes) -> bool:
    """Constant in time: digests of equal length are compared."""
    header = Headers(scope=scope).get("authorization", "")
    scheme, _, key = header.partition(" ")
    given = hashlib.sha256(key.strip().encode("latin-1")).digest()
    return hmac.compare_digest(given, expected) and scheme.lower() == "bearer"


def _wrong_key() -> HTTPError:
    return AuthenticationError("Send the server's API key as `Authorization: Bearer KEY`.")


class ReadinessGate:
    """503 with Retry-After until the engine is ready, and again while it drains."""

    def __init__(self, app: ASGIApp, engine: EngineProtocol) -> None:
        self.app = app
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["path"] not in ("/metrics", "/"):
            try:
                self.engine.check_ready()
            except HTTPError as error:
                return await send_error(error, scope, receive, send)
        await self.app(scope, receive, send)


class BodyLimit:
    """413 for a body over the limit: at once if its length is announced, else while it streams in."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(UPLOAD_PATHS):
            return await self.app(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self.max_bytes:
            return await send_error(self._too_large(), scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, counted, send)

    def _too_large(self) -> HTTPError:
        return PayloadTooLargeError(f"The body is larger than the limit of {self.max_bytes} bytes.")
