"""A client of raw sockets, cheap enough to overload a server from the cores that the server runs on too."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True)
class Answer:
    """seconds: to the status line, and to the end."""

    status: int
    headers: bytes
    body: bytes
    first: float
    total: float

    @property
    def complete(self) -> bool:
        """Everything that was asked for came."""
        return self.status == 200 and self.body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


class _Exchange(asyncio.Protocol):
    """Sends one request and collects what comes until the connection ends. (A stream's reader costs thrice as much.)"""

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = 0.0  # time.monotonic() of the first bytes
        self.parts: list[bytes] = []
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.first = self.first or time.monotonic()
        self.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def post(port: int, path: str, body: dict[str, Any] | bytes) -> Answer:
    """One request on a connection of its own. Raises OSError where it is cut before there is a head."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    started = time.monotonic()
    transport, exchange = await asyncio.get_running_loop().create_connection(
        lambda: _Exchange(request), "127.0.0.1", port
    )
    try:
        await exchange.ended
    finally:
        transport.close()
    ended = time.monotonic()
    headers, end, rest = b"".join(exchange.parts).partition(b"\r\n\r\n")
    if not end:
        raise ConnectionResetError("cut before there was a head")
    return Answer(int(headers.split()[1]), headers.lower() + end, rest, exchange.first - started, ended - started)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
