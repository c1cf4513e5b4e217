"""Track whether the store can be written, for /health, the metrics and the log."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import DiskFullError, HTTPError, StoreDamagedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreCondition:
    """Whether the store can be written.

    full: the disk has no room; failing: it refuses for another reason; damaged: read-only until repaired.
    """

    status: Literal["ok", "full", "failing", "damaged"] = "ok"
    detail: str | None = None


class ConditionLog:
    """The condition after the latest write. Each change is logged once. Thread-safe."""

    def __init__(self) -> None:
        self.now = StoreCondition()
        self._lock = threading.Lock()

    def failed(self, error: HTTPError) -> None:
        """Note that a write or a read failed with `error`."""
        match error:
            case StoreDamagedError():
                status, level = "damaged", logging.CRITICAL
            case DiskFullError():
                status, level = "full", logging.ERROR
            case _:
                status, level = "failing", logging.ERROR
        with self._lock:
            if self.now.status in (status, "damaged"):
                return
            self.now = StoreCondition(status, error.message)
        logger.log(level, "the store is %s: %s", status, error.message)

    def succeeded(self) -> None:
        """Note that a write is durable."""
        if self.now.status in ("ok", "damaged"):
            return
        with self._lock:
            self.now = StoreCondition()
        logger.info("the store can be written again")
