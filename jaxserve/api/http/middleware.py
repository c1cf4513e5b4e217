"""Check every request before its route: request ids, last-resort errors, API keys, readiness, limits on bodies.

The tables of paths say which routes are open, are for the admin, generate, or take uploads. The files of the page for
browsers are open, because the page asks for the API key itself. BaseHTTPMiddleware is not used: it triples the cost of
every streamed chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.api.body_cost import BodyLimits, BodySum
from jaxserve.api.http.errors import ANTHROPIC_PREFIX, ClientDisconnected, as_http_error, send_error
from jaxserve.api.keys import DEFAULT_CALLER, Caller, KeyRing, KeyUsage, set_caller
from jaxserve.api.process_group import NeedsMainProcessError
from jaxserve.api.state import EngineProtocol
from jaxserve.errors import (
    AuthenticationError,
    HTTPError,
    PermissionDeniedError,
    SlowRequestError,
    UnsupportedEncodingError,
)
from jaxserve.log import RequestRecord, fields, recorded_request
from jaxserve.telemetry.metrics import Metrics
from jaxserve.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

PAGE_FILES = frozenset(
    f"{name}.js" for name in ("api", "app", "calls", "chat", "files", "live", "markdown", "page", "pictures", "talks")
) | {"style.css"}
PAGE_PATHS = frozenset({"/", *(f"/web/{name}" for name in PAGE_FILES)})


OPEN_PATHS = frozenset({"/health", "/live"})  # open without a key and in every phase
WEIGHTS_UPLOAD = "/update_weights_from_tensor"
_ALWAYS_ANSWERED = OPEN_PATHS | PAGE_PATHS | {"/metrics"}
ADMIN_PATHS = frozenset(
    {
        *("/flush_cache", "/reset_prefix_cache", "/abort_request", "/key_usage"),
        *("/update_weights_from_disk", WEIGHTS_UPLOAD, "/update_weight_version"),
        "/get_weights_by_name",
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"),
        *("/pause_generation", "/continue_generation", "/release_memory_occupation", "/resume_memory_occupation"),
        *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"),
    }
)
GENERATING_PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/generate"),
        *("/v1/messages", "/v1/responses"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
        *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/classify", "/classify"),
        "/v1/decisions",
    }
)
UPLOAD_PATHS = ("/v1/files", "/files", WEIGHTS_UPLOAD)  # their limit is their own, and larger

SLOWEST_BYTES = 10_000.0  # bytes per second that a slow client's body must reach

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestContext:
    """Give each request an id, count it, log it, and answer 500 for an uncaught exception. The outermost layer.

    A slash at the end of a path is ignored. HEAD is answered as GET, and the connection leaves out the body.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing, log_requests: bool = False) -> None:
        self.app = app
        self.metrics = metrics
        self.tracing = tracing
        self.log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        with recorded_request() if self.log_requests else contextlib.nullcontext() as record:
            await self._answer(scope, receive, send, record)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord | None) -> None:
        started = time.perf_counter()
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state.setdefault("send_body", send)  # the connection sets it; another ASGI server does not
        status = 0
        counts = True
        is_anthropic = scope["path"].startswith(ANTHROPIC_PREFIX)  # Anthropic's clients read another header

        async def tagged(message: Message) -> None:
            """Add the request id and the processing time to the headers, and note the status."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                milliseconds = b"%d" % ((time.perf_counter() - started) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("latin-1")),
                    (b"openai-processing-ms", milliseconds),
                    *([(b"request-id", request_id.encode("latin-1"))] if is_anthropic else ()),
                ]
            await send(message)

        try:
            with self.tracing.request(scope["method"], scope["path"], request_id, Headers(scope=scope)) as span:
                try:
                    await self.app(_routed(scope), receive, tagged)
                except ClientDisconnected:
                    status = status or 499
                except NeedsMainProcessError:
                    counts = False  # the process that answers the request counts it
                    raise
                except Exception as error:
                    http_error = as_http_error(error)
                    if status == 0:
                        await send_error(http_error, scope, receive, tagged)
                finally:
                    span.end_with(status)
        finally:
            if counts:
                self.metrics.count_response(scope, status)
            if record is not None and counts:
                _log_request(scope, status, time.perf_counter() - started, record)


def _log_request(scope: Scope, status: int, seconds: float, record: RequestRecord) -> None:
    method, path, state = scope["method"], scope["path"], scope["state"]
    caller: Caller | None = state.get("caller")
    named = {"event": "request", "method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
    named |= {"request_id": state["request_id"], "key": None if caller is None else caller.name, **record.as_fields()}
    logger.info("%s %s %d %.3f s %s", method, path, status, seconds, state["request_id"], extra=fields(**named))


def _routed(scope: Scope) -> Scope:
    """Return the scope that the router reads: HEAD as GET, and no slash at the end of the path."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    if scope["path"] == "/" or not scope["path"].endswith("/"):
        return scope if method == scope["method"] else {**scope, "method": method}
    raw_path = scope.get("raw_path", b"").removesuffix(b"/")
    return {**scope, "method": method, "path": scope["path"][:-1], "raw_path": raw_path}


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


class Authentication:
    """Check bearer keys. The admin key opens every route. Without an admin key, the admin routes are off.

    With `server.keys`, each key may also abort its own requests by id.

    keys: returns the keys, which may change while the server runs
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Callable[[], KeyRing],
        metrics_auth: bool,
        more_admin_paths: frozenset[str] = frozenset(),
    ) -> None:
        self.app = app
        self._admin_paths = ADMIN_PATHS | more_admin_paths
        self._keys = keys
        self._open = OPEN_PATHS | PAGE_PATHS | (set() if metrics_auth else {"/metrics"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                set_caller(scope, self._caller(scope))
            except HTTPError as error:
                return await send_error(error, scope, receive, send)
        await self.app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        """Return the caller of a request. Raises HTTPError if its key does not open the path."""
        path = scope["path"]
        keys = self._keys()
        is_admin = path in self._admin_paths
        if not is_admin and path in self._open:
            return DEFAULT_CALLER
        caller = keys.find(scope)
        if not is_admin and not keys.needed:
            return caller or DEFAULT_CALLER
        if not is_admin or (path == "/abort_request" and keys.isolates):
            allowed = caller is not None
        elif keys.has_admin:
            allowed = caller is not None and caller.admin
        else:
            raise PermissionDeniedError("Admin routes are off: server.admin_api_key is not set.")
        if caller is None:
            raise _unknown_key("admin key" if is_admin else "API key", given=keys.is_given(scope))
        if not allowed:
            raise PermissionDeniedError(f"{path} needs the admin key, server.admin_api_key; this key is not it.")
        return caller


def _unknown_key(kind: str, *, given: bool) -> AuthenticationError:
    if given:
        return AuthenticationError(f"The key that was sent is wrong: this server has another {kind}.")
    how = f"Send the server's {kind} as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return AuthenticationError(f"The request has no API key. {how}")


class ReadinessGate:
    """Answer 503 with Retry-After while the engine loads or drains, and 429 while its queue is full.

    Answers to a key with limits have OpenAI's headers, which tell the rest of each limit.

    The queue is checked before the body is read, so that a refusal takes 0.2 ms instead of 1 ms. Under overload most
    requests are refused.

    prepare: awaited before each request; at the first request it loads the chat template
    usage_of: returns the usage of an API key, whose limits are checked here too; None: the key has no usage
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: EngineProtocol,
        metrics: Metrics,
        prepare: Callable[[], Awaitable[None]],
        usage_of: Callable[[str], KeyUsage | None],
    ) -> None:
        self.app = app
        self.usage_of = usage_of
        self.prepare = prepare
        self.engine = engine
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _ALWAYS_ANSWERED:
            try:
                self.engine.check_ready()
                await self.prepare()
                if scope["path"] in GENERATING_PATHS and scope["method"] == "POST":
                    usage = self.usage_of(scope["state"]["caller"].owner)
                    send = send if usage is None else _with_limits(send, usage)
                    self._check_queue(usage)
            except HTTPError as error:
                return await send_error(error, scope, receive, send)
        await self.app(scope, receive, send)

    def _check_queue(self, usage: KeyUsage | None) -> None:
        try:
            self.engine.check_queue()
            if usage is not None:
                usage.check()
        except HTTPError as error:
            self.metrics.count_error(error)
            raise


def _with_limits(send: Send, usage: KeyUsage) -> Send:
    """Return a `send` that adds the headers of the key's limits to the answer."""

    async def tagged(message: Message) -> None:
        if message["type"] == "http.response.start":
            added = [(name.encode(), value.encode()) for name, value in usage.headers().items()]
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return tagged


class BodyLimit:
    """Refuse a body with 413 over the size limit, 408 if it is slow, 415 if it is compressed.

    A body is refused with 429 if all bodies in memory together exceed their limit. A body that announces its length is
    refused at once, any other body while it arrives. Uploads have their own size limit.

    timeout: seconds for a body, plus one second for each SLOWEST_BYTES of it
    """

    def __init__(self, app: ASGIApp, limits: Callable[[], BodyLimits], held: BodySum, timeout: float) -> None:
        self.app = app
        self.limits = limits
        self.timeout = timeout
        self.sum = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limits = None if scope["path"].startswith(UPLOAD_PATHS) else self.limits()
        try:
            self._check_headers(Headers(scope=scope), limits)
        except HTTPError as error:
            return await send_error(error, scope, receive, send)
        body = _LimitedBody(receive, limits, self.sum, self.timeout)
        try:
            await self.app(scope, body, send)
        finally:
            body.forget()

    def _check_headers(self, headers: Headers, limits: BodyLimits | None) -> None:
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise UnsupportedEncodingError(f"A body in the Content-Encoding {encoding} is not read: send it as it is.")
        announced = headers.get("content-length", "")
        if limits is not None and announced.isdigit() and int(announced):
            limits.check_size(int(announced))
            self.sum.check(int(announced), limits.max_sum)


class _LimitedBody:
    """A `receive` with limits. Only time spent waiting for the client counts."""

    def __init__(self, receive: Receive, limits: BodyLimits | None, held: BodySum, timeout: float) -> None:
        self._receive = receive
        self._limits = limits
        self._sum = held
        self._timeout = timeout
        self._waited = 0.0
        self._received = 0
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:  # the next message is the client's disconnect
            return await self._receive()
        message = await self._next_part()
        size = len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        self._received += size
        if self._limits is not None:
            self._sum.add(size)
            self._limits.check_size(self._received)
            self._sum.check(0, self._limits.max_sum)
        return message

    def forget(self) -> None:
        """Release the bytes of the body, because the request has ended."""
        if self._limits is not None:
            self._sum.add(-self._received)

    async def _next_part(self) -> Message:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout + self._received / SLOWEST_BYTES - self._waited):
                return await self._receive()
        except TimeoutError:
            raise SlowRequestError("The body did not arrive in time.") from None
        finally:
            self._waited += time.monotonic() - began
