"""A client of raw sockets, cheap enough to overload a server from the cores that the server runs on too."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any


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


async def post(port: int, path: str, body: dict[str, Any] | bytes) -> Answer:
    """One request on a connection of its own. Raises OSError where it is cut."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        headers = await reader.readuntil(b"\r\n\r\n")
        first = time.monotonic() - started
        rest = await reader.read()
        return Answer(int(headers.split()[1]), headers.lower(), rest, first, time.monotonic() - started)
    finally:
        writer.close()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
