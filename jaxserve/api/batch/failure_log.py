"""Log a batch's failed attempts as totals, because 50,000 requests may fail in the same way."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from jaxserve.errors import HTTPError

LOG_INTERVAL = 60.0  # seconds between two log entries of one batch
MAX_LOGGED_CHARS = 200  # maximum length of a message, which may quote the client's input
MAX_REASONS = 3  # failures listed per entry; the rest is counted

logger = logging.getLogger(__name__)


class FailureLog:
    """Count the attempts of one batch that failed through the server's fault; log at most once per interval.

    clock: returns seconds
    """

    def __init__(self, batch_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._batch_id = batch_id
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._bug: Exception | None = None  # the first error that is not an HTTPError; it is logged with its traceback
        self._next = clock()

    def note(self, error: Exception) -> None:
        """Count an attempt that failed with `error`."""
        if isinstance(error, HTTPError):
            reason = error.message
        else:
            reason = f"unexpected {type(error).__name__}"
            self._bug = self._bug or error
        self._counts[reason[:MAX_LOGGED_CHARS]] += 1
        if self._clock() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Log the failures since the last entry, if there are any."""
        if not self._counts:
            return
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self._counts.most_common(MAX_REASONS))
        level = logging.ERROR if self._bug is not None else logging.WARNING
        total = self._counts.total()
        logger.log(level, "batch %s: %d attempts failed: %s", self._batch_id, total, reasons, exc_info=self._bug)
        self._counts.clear()
        self._bug = None
        self._next = self._clock() + LOG_INTERVAL
