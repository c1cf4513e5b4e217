"""Pure ASGI middleware: request ids and last-resort errors, keys, readiness, the limit on bodies.

No BaseHTTPMiddleware: it triples the cost of every streamed chunk.
"""

from __future__ import annotations

import asyncio
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
from jaxserve.errors import (
    AuthenticationError,
    HTTPError,
    PayloadTooLargeError,
    PermissionDeniedError,
    SlowRequestError,
)
from jaxserve.metrics import Metrics
from jaxserve.tracing import Tracing

OPEN_PATHS = frozenset({"/health", "/live"})  # no key, any phase
ADMIN_PATHS = frozenset({"/flush_cache", "/abort_request"})
GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/generate"})
UPLOAD_PATHS = ("/v1/files", "/files")  # have their own, larger limit

SLOWEST_BYTES = 10_000.0  # a second: what a slow client's body must bring to be waited for

logger = logging.getLogger(__name__)

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestContext:
    """Outermost: gives each request an id, counts and logs it, and turns what nobody caught into a 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing, log_requests: bool = False) -> None:
        self.app = app
        self.metrics = metrics
        self.tracing = tracing
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
            with self.tracing.request(scope["method"], scope["path"], request_id, Headers(scope=scope)) as span:
                try:
                    await self.app(scope, receive, tagged)
                except ClientDisconnected:
                    status = status or 499
                except Exception as error:
                    http_error = as_http_error(error)
                    if status == 0:
                        await send_error(http_error, scope, receive, tagged)
                finally:
                    span.end_with(status)
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
    """503 with Retry-After until the engine is ready, and again while it drains; 429 where its queue is full.

    A full queue is seen here before the body is read: a refusal then costs 0.2 ms and not a millisecond, and it is
    under overload that they are many.
    """

    def __init__(self, app: ASGIApp, engine: EngineProtocol, metrics: Metrics) -> None:
        self.app = app
        self.engine = engine
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["path"] not in ("/metrics", "/"):
            try:
                self.engine.check_ready()
                if scope["path"] in GENERATING_PATHS and scope["method"] == "POST":
                    self._check_queue()
            except HTTPError as error:
                return await send_error(error, scope, receive, send)
        await self.app(scope, receive, send)

    def _check_queue(self) -> None:
        try:
            self.engine.check_queue()
        except HTTPError as error:
            self.metrics.errors.labels(error.code or error.type).inc()
            raise


class BodyLimit:
    """413 for a body over the limit: at once if its length is announced, else while it streams in. 408 for a slow one.

    timeout: seconds for a body, and one more for each SLOWEST_BYTES of it. Uploads have their own limit of bytes.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        max_bytes = None if scope["path"].startswith(UPLOAD_PATHS) else self.max_bytes
        announced = Headers(scope=scope).get("content-length", "")
        if max_bytes is not None and announced.isdigit() and int(announced) > max_bytes:
            return await send_error(_too_large(max_bytes), scope, receive, send)
        await self.app(scope, _LimitedBody(receive, max_bytes, self.timeout), send)


class _LimitedBody:
    """A `receive` with limits. Only the time spent in waiting for the client counts."""

    def __init__(self, receive: Receive, max_bytes: int | None, timeout: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._waited = 0.0
        self._received = 0
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:  # what comes now is the client's leaving
            return await self._receive()
        message = await self._next_part()
        self._received += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._max_bytes is not None and self._received > self._max_bytes:
            raise _too_large(self._max_bytes)
        return message

    async def _next_part(self) -> Message:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout + self._received / SLOWEST_BYTES - self._waited):
                return await self._receive()
        except TimeoutError:
            raise SlowRequestError("The body did not arrive in time.") from None
        finally:
            self._waited += time.monotonic() - began


def _too_large(max_bytes: int) -> HTTPError:
    return PayloadTooLargeError(f"The body is larger than the limit of {max_bytes} bytes.")
