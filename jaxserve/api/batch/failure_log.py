"""What the log says of a batch's failed attempts: sums, because 50,000 requests may fail in the same way."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from jaxserve.errors import HTTPError

INTERVAL = 60.0  # seconds between two entries of one batch
MAX_CHARS = 200  # of a message: it may quote the client's input
MAX_REASONS = 3  # shown in one entry; the rest is counted

logger = logging.getLogger(__name__)


class FailureLog:
    """Counts the attempts of one batch that failed by the server's fault; at most one log entry an interval.

    clock: seconds
    """

    def __init__(self, batch_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._batch_id = batch_id
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._bug: Exception | None = None  # the first that is no HTTPError: it is logged with its traceback
        self._next = clock()

    def note(self, error: Exception) -> None:
        """An attempt met `error`."""
        if isinstance(error, HTTPError):
            reason = error.message
        else:
            reason, self._bug = f"unexpected {type(error).__name__}", self._bug or error
        self._counts[reason[:MAX_CHARS]] += 1
        if self._clock() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Log what was counted since the last entry, if anything was."""
        if not self._counts:
            return
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self._counts.most_common(MAX_REASONS))
        level = logging.ERROR if self._bug is not None else logging.WARNING
        total = self._counts.total()
        logger.log(level, "batch %s: %d attempts failed: %s", self._batch_id, total, reasons, exc_info=self._bug)
        self._counts.clear()
        self._bug, self._next = None, self._clock() + INTERVAL
