"""The engine's log lines: what it did since the last line, while it is busy, and one last line when it goes idle."""

from __future__ import annotations

import logging
import time

from jaxserve.engine.messages import EngineStats

logger = logging.getLogger(__name__)


class StatsLog:
    """Turns EngineStats into lines at most every `interval` seconds. `num_pages`: of the whole pool."""

    def __init__(self, interval: float, num_pages: int, page_size: int) -> None:
        self._interval = interval
        self._num_pages = max(1, num_pages)  # an encoder has none
        self._page_size = page_size
        self._last = EngineStats()
        self._last_time = time.monotonic()
        self._busy = False

    def due(self, *, busy: bool, now: float) -> bool:
        """Whether `log` should be called now: the interval has passed while busy, or the engine became idle."""
        if busy and not self._busy:
            self._busy, self._last_time = True, now  # the time before was idle and counts for no rate
        return self._busy and (not busy or now - self._last_time >= self._interval)

    def log(self, stats: EngineStats, *, busy: bool, now: float) -> None:
        """Write the lines of the time since the last call."""
        seconds = max(now - self._last_time, 1e-9)
        last, self._last, self._last_time, self._busy = self._last, stats, now, busy
        new, cached = (
            stats.computed_prompt_tokens - last.computed_prompt_tokens,
            stats.cached_tokens - last.cached_tokens,
        )
        if new or cached:
            logger.info(
                "prefill: new tokens %d, cached tokens %d, %.1f tokens/s, running %d, queued %d",
                *(new, cached, new / seconds, stats.num_running, stats.num_waiting),
            )
        generated = stats.generation_tokens - last.generation_tokens
        logger.info(
            "decode: running %d, queued %d, %.1f tokens/s, KV tokens %d (%.2f), steps %d, retracted %d%s",
            *(stats.num_running, stats.num_waiting, generated / seconds, stats.num_pages_used * self._page_size),
            *(stats.num_pages_used / self._num_pages, stats.steps - last.steps, stats.preemptions - last.preemptions),
            "" if busy else ", idle",
        )
