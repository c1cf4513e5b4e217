"""Serve one client's TCP connection, and close it if its headers are slow or too large or if the client does not read.

This layer knows only bytes and timers. Limits on bodies are in middleware.py, which knows the route.

The HTTP parser ignores the Upgrade header, as RFC 9110, section 7.8, allows, and reads the body after it. httptools
stops at the headers of such a request, loses its body and parses the following bytes as another request. The headers
are therefore parsed again without Upgrade.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Protocol

import httptools
import orjson
from uvicorn._types import ASGI3Application, ASGISendCallable, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxserve.api.unread_streams import ClientPace
from jaxserve.config import ServerSection


class ParserCallbacks(Protocol):
    """The parts of a request that the parser's callbacks have collected."""

    url: bytes
    headers: list[tuple[bytes, bytes]]  # names in lower case


class RequestParser:
    """Wrap httptools' parser, with the same callbacks.

    While `upgrades` is true, the callbacks run for headers that will be parsed a second time.
    """

    def __init__(self, request: ParserCallbacks) -> None:
        self._request = request
        self._parser = _parser(request)

    @property
    def upgrades(self) -> bool:
        """Return whether the current headers ask for an upgrade. They will be parsed again without it."""
        return self._parser.should_upgrade()

    def feed_data(self, data: bytes) -> None:
        """Parse bytes of the connection. Raises httptools.HttpParserError, also for the method CONNECT."""
        while True:
            try:
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                head = self._head_without_upgrade()
                self._parser = _parser(self._request)
                data = head + data[upgrade.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        method, version = self.get_method(), self.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not served")
        lines = [method + b" " + self._request.url + b" HTTP/" + version]
        for name, value in self._request.headers:
            if name == b"connection":
                value = b", ".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # --- the interface that uvicorn expects of its parser

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Return False: a request for an upgrade is parsed again before uvicorn sees it."""
        return False


def _parser(request: ParserCallbacks) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(request)
    # A client that sent "Connection: close" may have sent more. This is dropped with the connection without an error.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


MAX_HEADER_BYTES = 64 * 1024  # bytes of request line and headers together
MAX_HEADERS = 128
MAX_IDLE_BYTES = 2**20  # bytes of trailers or chunk headers without body data; more than one read of a socket
LINGER = 2.0  # seconds for a client that was answered early to finish sending its body


def limited_protocol(section: ServerSection) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with the limits of the configuration section."""
    limits = {"header_timeout": section.header_timeout, "send_timeout": section.send_timeout}
    return type("Connection", (LimitedProtocol,), limits)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which also closes slow connections.

    header_timeout: seconds from the first byte of a request, or from the connection, to the end of its headers
    send_timeout: seconds within which the client must read until writing resumes. The transport pauses at 64 KiB of
      unsent data and resumes at 16 KiB
    """

    header_timeout = 10.0
    send_timeout = 60.0

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.parser = RequestParser(self)
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._pace = ClientPace()
        self._in_headers = True
        self._header_bytes = 0
        self._message = 0  # number of the request on this connection
        self._too_large = False
        self._idle_bytes = 0  # bytes received since the headers or the last piece of the body

    # --- connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.header_timeout, self._headers_are_late)

    def connection_lost(self, exc: Exception | None) -> None:
        timers = (self._header_timer, self._send_timer, self._linger_timer, self.timeout_keep_alive_task)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        self._tell_request()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.send = _delimited_by_close(cycle)  # type: ignore[method-assign]
        cycle.scope.setdefault("state", {})["send_body"] = cycle.send  # see sse.EventStream
        super()._start_asgi_task(cycle, app)

    # --- headers

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and close the connection if headers or bytes without body data exceed their limit.

        The piece in which a request begins is not counted, because most of it may be the body of the previous request.
        It has at most the 256 KiB of one read, and `on_headers_complete` checks the exact size.
        """
        message = self._message
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data) if message == self._message else 0
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(431, "The request's headers are too large.")
        else:
            self._idle_bytes += len(data)
            if self._idle_bytes > MAX_IDLE_BYTES:
                self._cut()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are not headers: the request has been admitted already
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._message += 1
        self._in_headers = True
        self._header_bytes = 0
        self._idle_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self._headers_are_late)

    def on_headers_complete(self) -> None:
        """Check the size of the headers and stop their timer. Raises ValueError if they are too large."""
        if self.parser.upgrades:
            return
        self._in_headers = False
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            self._too_large = True
            raise ValueError("headers too large")  # makes the parser fail, which calls send_400_response
        self.scope.setdefault("state", {})["pace"] = self._pace
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse(431, "The request's headers are too large.")
        else:
            self._refuse(400, msg)

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self._refuse(408, "The request's headers did not arrive in time.")

    def _cut(self) -> None:
        """Close at once and drop unsent data. The request is notified before its next write."""
        self._tell_request()
        self.transport.abort()

    def _tell_request(self) -> None:
        """Notify the running request. With pipelining, uvicorn would notify the last request received instead."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _refuse(self, status: int, message: str) -> None:
        if self._running is not None and not self._running.response_complete:
            if self._running is not self.cycle or not self.cycle.more_body or self.cycle.response_started:
                return self._cut()  # another answer is due, or being sent
            self._tell_request()  # the refused bytes belong to its body
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = orjson.dumps({"error": error})
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    # --- a body that the application no longer reads

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._linger_timer = self.loop.call_later(LINGER, self.transport.close)

    def on_message_complete(self) -> None:
        """Note the end of the body and stop the timer for it."""
        if self.parser.upgrades:
            return
        super().on_message_complete()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
            self.cycle.more_body = False

    # --- a client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pace.paused = True
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self.send_timeout, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pace.paused = False
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def _delimited_by_close(cycle: RequestResponseCycle) -> ASGISendCallable:
    """Return a `send` for HTTP/1.0, which has no chunks (RFC 9112, 6.1): the close ends a body of unknown length.

    uvicorn closes the connection after every answer to such a client.
    """
    write = cycle.send
    has_length = True

    async def send(message: ASGISendEvent) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif message["type"] == "http.response.body" and not has_length:
            more = message.get("more_body", False)  # pieces may be sent by two tasks, the last one by itself
            cycle.expected_content_length = sys.maxsize if more else len(message.get("body", b""))
        await write(message)

    return send
