"""Length-prefixed frames over one stream socket between two event loops. Does not interpret them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from jaxserve.transport.child_frames import HEAD_BYTES, frame_size, framed


class FrameStream(asyncio.Protocol):
    """One end of a connection.

    on_frame: called with the body of each frame; an exception closes the connection
    on_end: called once, after the other end has closed or died
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is of no class of asyncio's

    def send(self, body: bytes) -> None:
        """Send a frame. It is kept in memory until the other end reads it, and dropped if that has closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(body))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take in bytes. Raises ValueError if a frame is too large, which closes the connection."""
        self._received += data
        start, end = 0, len(self._received)
        while end - start >= HEAD_BYTES:
            stop = start + HEAD_BYTES + frame_size(bytes(self._received[start : start + HEAD_BYTES]))
            if stop > end:
                break
            self._on_frame(bytes(self._received[start + HEAD_BYTES : stop]))
            start = stop
        if start:
            del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()
