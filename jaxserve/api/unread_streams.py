"""Limit the memory of streams whose clients do not read.

A stream blocks once its connection buffers 64 KiB. The engine continues, and its outputs are kept until the client
reads. At the limit the stream ends with an error, and its requests end in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxserve.errors import SlowReaderError

CHECK_SECONDS = 0.25
STREAMS_IN_TOTAL = 16  # limit on all streams together, as a multiple of the limit on one


@dataclass(slots=True)
class ClientPace:
    """Whether a connection waits for its client to read."""

    paused: bool = False


class Stream(Protocol):
    """An answer that is being sent to a client."""

    @property
    def paused(self) -> bool:
        """Return whether the client is not reading."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes of outputs that wait for the client."""
        ...

    def end_with(self, error: SlowReaderError) -> None: ...


class UnreadStreams:
    """The active streams of one server. max_bytes: limit on one stream whose client does not read"""

    def __init__(self, max_bytes: int, count: Callable[[SlowReaderError], None]) -> None:
        self._max_bytes = max_bytes
        self._count = count
        self._streams: set[Stream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Stream) -> None:
        self._streams.add(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def remove(self, stream: Stream) -> None:
        self._streams.discard(stream)

    def held(self) -> dict[Stream, int]:
        """Return the bytes of outputs that wait for each client that does not read."""
        return {stream: stream.held_bytes() for stream in self._streams if stream.paused}

    def _check(self) -> None:
        """End the streams over their limit, then the largest ones until the total is within its limit."""
        held = self.held()
        total, limit = sum(held.values()), STREAMS_IN_TOTAL * self._max_bytes
        for stream in sorted(held, key=held.__getitem__, reverse=True):
            if held[stream] <= self._max_bytes and total <= limit:
                break
            total -= held[stream]
            self._end(stream, held[stream])
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CHECK_SECONDS, self._check) if self._streams else None

    def _end(self, stream: Stream, held: int) -> None:
        error = SlowReaderError(f"The stream was not read, and {held} bytes of outputs waited for the client.")
        self._streams.discard(stream)
        self._count(error)
        stream.end_with(error)
