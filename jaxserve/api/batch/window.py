"""How many lines may be in flight at once, over all batches.

A line is in flight from its start until its result is durable, so the window also bounds what a crash can undo and
what a full disk can hold up in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

MAX_BYTES = 32 * 2**20  # of input in flight; a longer line runs alone
POLL = 0.02  # seconds after which the limit is read again: online load changes without telling us


class Window:
    """Places for lines, given in the order in which they are asked for: batches take turns.

    limit: lines that may be in flight now, given those that are; read again and again
    """

    def __init__(self, limit: Callable[[int], int], max_bytes: int = MAX_BYTES) -> None:
        self.lines = 0
        self._bytes = 0
        self._limit = limit
        self._max_bytes = max_bytes
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Wait for a place for a line of `size` bytes. Pair with `leave`."""
        async with self._turn:
            while not self._fits(size):
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), POLL)
            self.lines += 1
            self._bytes += size

    def leave(self, size: int) -> None:
        self.lines -= 1
        self._bytes -= size
        self._freed.set()

    def _fits(self, size: int) -> bool:
        if self.lines == 0:
            return True
        return self.lines < self._limit(self.lines) and self._bytes + size <= self._max_bytes


def spare_slots(rows: int, num_online: int) -> int:
    """Lines that fill what online requests leave of the engine, but for an eighth of it.

    The eighth is for the next online requests: they find a slot at once, and lines give way as they come.

    rows: requests with which the engine is busy; num_online: those there now
    """
    return rows - max(1, rows // 8) - num_online
