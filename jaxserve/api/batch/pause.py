"""Delay work while the store refuses writes: longer after each attempt, and visible to the client of a batch."""

from __future__ import annotations

import asyncio
import logging
import random

from jaxserve.errors import StorageError
from jaxserve.store import BatchError

MAX_FACTOR = 16  # the longest delay, as a multiple of the first

logger = logging.getLogger(__name__)


class StoragePause:
    """The current delay of one batch or response, if it is delayed.

    name: for the log
    first_delay: seconds until the second attempt. The delay doubles up to MAX_FACTOR times that, less a random part
    of up to one half, so that those of a server do not all retry at once.
    """

    def __init__(self, name: str, first_delay: float) -> None:
        self._name = name
        self._first_delay = first_delay
        self._factor = 1
        self._reason: str | None = None

    @property
    def error(self) -> BatchError | None:
        """The error that the Batch object shows to clients meanwhile."""
        if self._reason is None:
            return None
        return BatchError("waiting_for_storage", f"{self._reason} The batch goes on once it can be written.")

    async def wait(self, error: StorageError) -> None:
        """Return when it is time for the next attempt."""
        if self._reason is None:
            logger.warning("%s waits: %s", self._name, error.message)
        self._reason = error.message
        delay = self._first_delay * self._factor * random.uniform(0.5, 1.0)
        self._factor = min(2 * self._factor, MAX_FACTOR)
        await asyncio.sleep(delay)

    def end(self) -> None:
        """Reset the delay: the store accepted a write."""
        if self._reason is not None:
            logger.info("%s goes on", self._name)
        self._factor, self._reason = 1, None
