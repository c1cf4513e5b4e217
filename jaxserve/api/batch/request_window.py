"""Limit how many batch requests and background responses are in flight at once, over all batches.

Either is in flight from its start until its result is durable. The window therefore also limits the work that a crash
can lose, and the memory that results take while the disk is full.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

MAX_INPUT_BYTES = 32 * 2**20  # bytes of input in flight; a larger batch request runs alone
LIMIT_POLL = 0.02  # seconds after which the limit is read again, because online load changes without notice


class RequestWindow:
    """Admit batch requests in first-in first-out order, so that batches alternate.

    limit: returns how many may be in flight now, given how many are; called repeatedly
    """

    def __init__(self, limit: Callable[[int], int], max_bytes: int = MAX_INPUT_BYTES) -> None:
        self.num_running = 0
        self._bytes = 0
        self._limit = limit
        self._max_bytes = max_bytes
        self._entering = asyncio.Lock()
        self._freed = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Wait until a batch request of `size` bytes fits. Pair with `leave`."""
        async with self._entering:
            while not self._fits(size):
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), LIMIT_POLL)
            self.num_running += 1
            self._bytes += size

    def leave(self, size: int) -> None:
        self.num_running -= 1
        self._bytes -= size
        self._freed.set()

    def _fits(self, size: int) -> bool:
        if self.num_running == 0:
            return True
        return self.num_running < self._limit(self.num_running) and self._bytes + size <= self._max_bytes


def spare_slots(rows: int, num_online: int) -> int:
    """Return how many batch requests fill the engine beside the online requests, less one eighth of its rows.

    The eighth stays free for the next online requests, so that each starts at once while batch requests finish.

    rows: the engine's rows that are in use; num_online: online requests now
    """
    return rows - max(1, rows // 8) - num_online
