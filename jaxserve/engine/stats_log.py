"""The engine's log lines: what it did since the last line while it is busy, and one line when it becomes idle."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from jaxserve.types.messages import EngineStats

logger = logging.getLogger(__name__)


class StatsLog:
    """Writes a line at most every `interval` seconds, each about a busy period of at most that length.

    Idle gaps shorter than the interval belong to the busy period. A single request that finishes within the interval
    leaves no line. num_pages: size of the whole pool.
    """

    def __init__(
        self, interval: float, num_pages: int, page_size: int, reasons: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._interval = interval
        self._reasons = reasons
        self._num_pages = max(1, num_pages)  # an encoder has no pages
        self._page_size = page_size
        self._last = EngineStats()  # at the start of the current period
        self._started: float | None = None  # start of the current period, time.monotonic(); None: idle
        self._last_busy = 0.0  # time.monotonic()
        self._has_written = False  # a line was written since the engine was last idle

    def update(self, stats: Callable[[], EngineStats], *, busy: bool, now: float) -> None:
        """Process one iteration of the engine loop at time.monotonic() `now` and write the lines that are due.

        stats: called only if a busy period ends or a line is due
        """
        if busy:
            self._work(stats, now)
        elif self._started is not None and now - self._last_busy >= self._interval:
            self._rest(stats())

    def _work(self, stats: Callable[[], EngineStats], now: float) -> None:
        self._last_busy = now
        if self._started is None:
            self._started, self._has_written = now, False
        elif now - self._started >= self._interval:
            self._write(stats(), now - self._started)
            self._started, self._has_written = now, True

    def _rest(self, stats: EngineStats) -> None:
        """End a busy period. Write a line if the period had lines before."""
        if self._has_written and self._started is not None:
            self._write(stats, self._last_busy - self._started, ", idle")
        self._last, self._started = stats, None

    def _write(self, stats: EngineStats, seconds: float, note: str = "") -> None:
        seconds = max(seconds, 1e-9)
        last, self._last = self._last, stats
        new = stats.computed_prompt_tokens - last.computed_prompt_tokens
        cached = stats.cached_tokens - last.cached_tokens
        if new or cached:
            logger.info(
                "prefill: new tokens %d, cached tokens %d, %.1f tokens/s, running %d, queued %d",
                *(new, cached, new / seconds, stats.num_running, stats.num_waiting),
            )
        if counts := Counter(self._reasons()).most_common():
            logger.info("waiting: %s", "; ".join(f"{count} for {reason}" for reason, count in counts))
        generated = stats.generation_tokens - last.generation_tokens
        logger.info(
            "decode: running %d, queued %d, %.1f tokens/s, KV tokens %d (%.2f), steps %d, retracted %d%s",
            *(stats.num_running, stats.num_waiting, generated / seconds, stats.num_pages_used * self._page_size),
            *(stats.num_pages_used / self._num_pages, stats.steps - last.steps, stats.preemptions - last.preemptions),
            note,
        )
