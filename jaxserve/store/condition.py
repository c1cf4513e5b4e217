"""Whether the store can be written: what /health, the metrics and the log say of it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import DiskFullError, HTTPError, StoreDamagedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreCondition:
    """full: the disk has no room; failing: it refuses otherwise; damaged: read-only until it is repaired."""

    status: Literal["ok", "full", "failing", "damaged"] = "ok"
    detail: str | None = None


class ConditionLog:
    """The condition after the latest write. Each change is logged once. Thread-safe."""

    def __init__(self) -> None:
        self.now = StoreCondition()
        self._lock = threading.Lock()

    def failed(self, error: HTTPError) -> None:
        """A write, or a read, met `error`."""
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
        """A write is durable."""
        if self.now.status in ("ok", "damaged"):
            return
        with self._lock:
            self.now = StoreCondition()
        logger.info("the store can be written again")
