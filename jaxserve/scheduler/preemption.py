"""Chooses running requests to preempt: if decoding requests lack pages, or if a better request has no room."""

from __future__ import annotations

import logging
from collections.abc import Callable

from jaxserve.kv.kv_manager import KVManager
from jaxserve.scheduler.admission import Room
from jaxserve.scheduler.running_set import RunningSet
from jaxserve.scheduler.scheduler_stats import Counters
from jaxserve.scheduler.step_builder import pages_wanted
from jaxserve.types.request import Request

logger = logging.getLogger(__name__)


class Preemption:
    """Chooses the requests to preempt. The callback `preempt` puts one back into the queue."""

    def __init__(
        self,
        kv: KVManager,
        running: RunningSet,
        room: Room,
        counters: Counters,
        preempt: Callable[[Request], None],
        tokens_per_step: int,
    ) -> None:
        self._kv = kv
        self._running = running
        self.room = room
        self._counters = counters
        self._preempt = preempt
        self._tokens_per_step = tokens_per_step

    # --- if pages run out

    def make_room(self, num_waiting: int) -> None:
        """Preempt requests if decoding requests need more pages than are free and no pages are about to be freed."""
        decoding, available = self._running.decoding, self._kv.num_available
        if available >= len(decoding) * self._kv.num_pages_for(2 * self._tokens_per_step - 1):
            return
        wanted = sum(self._pages_wanted(request) for request in decoding)
        if wanted > available:
            self._kv.merge_duplicates(self._running)
            available = self._kv.num_available
        ending = any(request.num_computed_tokens >= request.max_computed_tokens for request in decoding)
        if wanted > available and not (ending or self._kv.has_leaving):
            self._preempt_for_pages([wanted - left for left in self._kv.available()], num_waiting)

    def _preempt_for_pages(self, missing: list[int], num_waiting: int) -> None:
        """Preempt the requests with the least progress until each layer group has the pages that it lacks.

        The request with the most progress always stays.
        """
        kept = self._running.best_first(by_priority=True)
        count, wanted = len(kept), max(missing)
        while max(missing) > 0 and len(kept) > 1:
            victim = kept.pop()
            spared = self._pages_wanted(victim)
            missing = [m - own - spared for m, own in zip(missing, self._kv.num_reclaimable(victim), strict=True)]
            self._preempt(victim)
        self.room.ratio.rise(kept)
        preempted = count - len(kept)
        self._counters.retractions += preempted
        self._counters.retraction_events += 1
        logger.info(
            "%d pages short: preempted %d of %d requests, %d wait, new-token ratio now %.3f",
            wanted, preempted, count, num_waiting + preempted, self.room.ratio.value,
        )  # fmt: skip

    def _pages_wanted(self, request: Request) -> int:
        return pages_wanted(request, self._kv, self._tokens_per_step)

    # --- if a better request waits

    def could_help(self, priority: int) -> bool:
        """Whether a request of worse priority than this one runs."""
        return any(request.priority > priority for request in self._running)

    def preempt_for(self, request: Request, missing: list[int]) -> None:
        """Preempt requests of worse priority if that makes room for a better one.

        missing: token deficit of each layer group
        """
        if self._kv.has_leaving or not self.could_help(request.priority):
            return
        victims: list[Request] = []
        for victim in reversed(self._running.best_first(by_priority=True)):
            if self._is_enough(missing, victims) or victim.aged or victim.priority <= request.priority:
                break
            victims.append(victim)
            freed = zip(missing, self._kv.num_reclaimable(victim), self.room.reserve((victim,)), strict=True)
            missing = [m - pages * self._kv.page_size - growth for m, pages, growth in freed]
        if self._is_enough(missing, victims):
            for victim in victims:
                self._preempt(victim)
            self._counters.priority_preemptions += len(victims)

    def _is_enough(self, missing: list[int], victims: list[Request]) -> bool:
        return max(missing) <= 0 and bool(victims or self._kv.num_free_slots)
