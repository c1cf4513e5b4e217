"""How a batch waits while the store refuses: longer from attempt to attempt, and visibly."""

from __future__ import annotations

import asyncio
import logging
import random

from jaxserve.errors import StorageError
from jaxserve.store import BatchError

MAX_FACTOR = 16  # the longest delay, in units of the first

logger = logging.getLogger(__name__)


class StoragePause:
    """The present wait of one batch, if it waits.

    first_delay: seconds until the second attempt. It doubles up to MAX_FACTOR times that, less up to a half at random,
    so that the batches of a server do not all try at the same moment.
    """

    def __init__(self, batch_id: str, first_delay: float) -> None:
        self._batch_id = batch_id
        self._first_delay = first_delay
        self._factor = 1
        self._reason: str | None = None

    @property
    def error(self) -> BatchError | None:
        """What clients see of it in the batch."""
        if self._reason is None:
            return None
        return BatchError("waiting_for_storage", f"{self._reason} The batch goes on once it can be written.")

    async def wait(self, error: StorageError) -> None:
        """Return when it is time for the next attempt."""
        if self._reason is None:
            logger.warning("batch %s waits: %s", self._batch_id, error.message)
        self._reason = error.message
        delay = self._first_delay * self._factor * random.uniform(0.5, 1.0)
        self._factor = min(2 * self._factor, MAX_FACTOR)
        await asyncio.sleep(delay)

    def end(self) -> None:
        """The store has taken a write."""
        if self._reason is not None:
            logger.info("batch %s goes on", self._batch_id)
        self._factor, self._reason = 1, None
