"""The queue between the engine's outputs of one request and the reader of its stream."""

from __future__ import annotations

import asyncio
from collections import deque

from jaxserve.errors import HTTPError
from jaxserve.text.detokenizer import RequestOutput

MAX_AT_ONCE = 32  # outputs read in a row; with 20 log-probabilities each takes 0.1 ms to write


class Outbox:
    """A queue of outputs for one reader. Every token passes here; asyncio.Queue takes 1.5 us longer per item."""

    __slots__ = ("__weakref__", "_at_once", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[RequestOutput | HTTPError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._at_once = 0  # outputs read since the reader last yielded to the event loop

    def put(self, item: RequestOutput | HTTPError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def held_bytes(self) -> int:
        """Estimate the memory of the unread outputs, in bytes. Uses the size of the last one, because thousands may
        wait.
        """
        last = self._items[-1] if self._items else None
        return len(self._items) * last.held_bytes() if isinstance(last, RequestOutput) else 0

    async def get(self) -> RequestOutput | HTTPError:
        """Wait for and return the next output. Yields to the event loop every MAX_AT_ONCE outputs."""
        while not self._items:
            self._at_once = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._at_once += 1
        if self._at_once >= MAX_AT_ONCE:
            self._at_once = 0
            await asyncio.sleep(0)
        item = self._items.popleft()
        if isinstance(item, RequestOutput) and item.prompt_logprobs is not None:
            # writing prompt log-probabilities takes as long as writing a thousand other outputs
            self._at_once = MAX_AT_ONCE
        return item
