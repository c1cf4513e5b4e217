"""Forward a request to another process of this server over its Unix socket, and the answer back, as bytes.

A worker uses this for requests that only the main process can answer (`ForwardToMain`). It knows most of them by their
path. It knows a request that continues a session, or that has a thread of Messages, once the body has been read, and
forwards it with that body.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from functools import partial

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.api.http.errors import send_error
from jaxserve.api.http.middleware import GENERATING_PATHS
from jaxserve.api.process_group import NeedsMainProcessError
from jaxserve.errors import NotReadyError

PIECE_BYTES = 64 * 1024

# headers of one connection, not of the request or the answer; uvicorn writes its own date
_NOT_FORWARDED = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade", b"expect", b"date"}
)

Headers = list[tuple[bytes, bytes]]


class PeerEndedError(Exception):
    """The other process does not accept the connection, or ended in the middle of its answer.

    has_headers: whether the answer's beginning has been sent to the client
    """

    def __init__(self, message: str, *, has_headers: bool = False) -> None:
        super().__init__(message)
        self.has_headers = has_headers


async def forward(socket_path: str, scope: Scope, receive: Receive, send: Send, body: bytes | None = None) -> None:
    """Forward one request; return when the answer is sent or the client has disconnected, which ends the request.

    body: the body if it has been read; None: read it from `receive`
    Raises PeerEndedError, and the errors of `receive`.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, socket_path)
        except OSError as error:
            raise PeerEndedError(str(error)) from None
        await _exchange(connection, scope, receive, send, body)


async def _exchange(connection: socket.socket, scope: Scope, receive: Receive, send: Send, body: bytes | None) -> None:
    """Send the request and its answer at the same time.

    The connection is a plain socket, because a stream of asyncio drops bytes that it could still read once a write
    fails.
    """
    answer = asyncio.ensure_future(_answer(connection, send, has_body=scope["method"] != "HEAD"))
    upload = asyncio.ensure_future(_upload(connection, scope, receive, body))
    try:
        await asyncio.wait((answer, upload), return_when=asyncio.FIRST_COMPLETED)
        await (answer if answer.done() else upload)
    finally:
        for task in (answer, upload):
            task.cancel()
        await asyncio.gather(answer, upload, return_exceptions=True)


async def _upload(connection: socket.socket, scope: Scope, receive: Receive, body: bytes | None) -> None:
    """Send the request; return when the client has disconnected."""
    chunked = body is None and any(name == b"transfer-encoding" for name, _ in scope["headers"])
    write = partial(asyncio.get_running_loop().sock_sendall, connection)
    try:
        await write(_head(scope, chunked=chunked, length=None if body is None else len(body)))
        async for part in _parts(receive) if body is None else _once(body):
            await write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
        if chunked:
            await write(b"0\r\n\r\n")
    except _DisconnectedError:
        return
    except OSError:
        pass  # the other process has answered without reading all
    while (await receive())["type"] != "http.disconnect":
        pass


class _DisconnectedError(Exception):
    """The client disconnected in the middle of its body."""


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _DisconnectedError
        more = message.get("more_body", False)
        if part := message.get("body"):
            yield part


def _head(scope: Scope, *, chunked: bool, length: int | None) -> bytes:
    """Return the request line and the headers. length: bytes of a body that has been read"""
    headers = _forwarded(scope["headers"])
    if length is not None:
        headers = [each for each in headers if each[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % length))
    if chunked:
        headers.append((b"transfer-encoding", b"chunked"))
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    line = b"%b %b HTTP/1.1" % (scope["method"].encode(), scope["raw_path"] + query)
    lines = [line, *(b"%b: %b" % each for each in headers), b"connection: close"]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_FORWARDED]


@dataclass
class _Response:
    """The answer as far as httptools has parsed it. parts: pieces of the body that have not been sent yet"""

    headers: Headers = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    has_headers: bool = False
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.has_headers = True

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


async def _answer(connection: socket.socket, send: Send, *, has_body: bool) -> None:
    """Send the answer to the client. Raises PeerEndedError if the process ends in the middle of it.

    has_body: whether a body follows the headers
    """
    response = _Response()
    started = False
    parser = httptools.HttpResponseParser(response)
    while not response.complete:
        data = await _read(connection)
        if not data:
            raise PeerEndedError("it closed the connection", has_headers=started)
        parser.feed_data(data)
        if response.has_headers and not started:
            started = True
            headers = _forwarded(response.headers)
            await send({"type": "http.response.start", "status": parser.get_status_code(), "headers": headers})
            response.complete |= not has_body
        if response.parts:
            body = b"".join(response.parts)
            response.parts = []
            await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read(connection: socket.socket) -> bytes:
    """Return the bytes that have arrived; none if the process closed the connection or was killed."""
    try:
        return await asyncio.get_running_loop().sock_recv(connection, PIECE_BYTES)
    except ConnectionError:
        return b""


# The paths that a worker answers. /v1/responses reads and writes the store.
WORKER_PATHS = (GENERATING_PATHS - {"/v1/responses"}) | {
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens")
}


class ForwardToMain:
    """The outermost ASGI middleware of a worker. main_socket: path of the main process's socket"""

    def __init__(self, app: ASGIApp, main_socket: str) -> None:
        self.app = app
        self._main_socket = main_socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["path"] not in WORKER_PATHS:
            return await self._forward(scope, receive, send, None)
        try:
            await self.app(scope, receive, send)
        except NeedsMainProcessError:
            await self._forward(scope, receive, send, scope["state"]["body"])

    async def _forward(self, scope: Scope, receive: Receive, send: Send, body: bytes | None) -> None:
        """Forward one request. body: the body if it has been read"""
        try:
            await forward(self._main_socket, scope, receive, send, body)
        except PeerEndedError as error:
            if error.has_headers:
                raise  # which closes the client's connection
            await send_error(NotReadyError("The server starts or ends."), scope, receive, send)
