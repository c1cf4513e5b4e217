"""Chooses running requests to preempt: if decoding requests lack pages, or if a better request has no room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from jaxserve.scheduler.admission import Room
from jaxserve.scheduler.running_set import RunningSet
from jaxserve.scheduler.scheduler_stats import Counters
from jaxserve.scheduler.step_builder import pages_wanted
from jaxserve.scheduler.waiting.tenants import TenantShares
from jaxserve.types.step import Request

logger = logging.getLogger(__name__)


class Preemption:
    """Chooses the requests to preempt. The callback `preempt` puts one back into the queue."""

    def __init__(
        self,
        room: Room,
        running: RunningSet,
        tenants: TenantShares,
        counters: Counters,
        preempt: Callable[[Request], None],
    ) -> None:
        self._kv = room.kv
        self._running = running
        self.tenants = tenants
        self.room = room
        self._counters = counters
        self._preempt = preempt

    # --- if pages run out

    def make_room(self, num_waiting: int) -> None:
        """Preempt requests if decoding requests need more pages than are free and no pages are about to be freed."""
        decoding, available = self._running.decoding, self._kv.num_available
        if available >= len(decoding):
            return
        wanted = sum(pages_wanted(request, self._kv) for request in decoding)
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
            spared = pages_wanted(victim, self._kv)
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

    # --- if a better request waits

    def could_help(self, priority: int) -> bool:
        """Return whether a request of worse priority than this one runs."""
        return any(request.priority > priority for request in self._running)

    def preempt_for(self, request: Request, missing: list[int], started: Collection[Request] = ()) -> None:
        """Preempt requests of worse priority, or of a tenant with more than its share, if that makes room for a
        better one.

        missing: token deficit of each layer group
        started: requests that got their slot in this step; they keep it
        """
        claim = self.tenants.claim(request, self._running, self._kv.page_size)
        if self._kv.has_leaving or not (claim or self.could_help(request.priority)):
            return
        victims: list[Request] = []
        for victim in reversed(self._running.best_first(by_priority=True)):
            if self._is_enough(missing, victims) or (victim.aged and claim is None):
                break
            if victim.priority < request.priority or victim in started:
                continue
            if victim.priority == request.priority or victim.aged:
                if claim is None or not claim.take(victim):
                    continue
            victims.append(victim)
            freed = zip(missing, self._kv.num_reclaimable(victim), self.room.reserve((victim,)), strict=True)
            missing = [m - pages * self._kv.page_size - growth for m, pages, growth in freed]
        if self._is_enough(missing, victims):
            for victim in victims:
                self._preempt(victim)
            self._counters.priority_preemptions += len(victims)

    def _is_enough(self, missing: list[int], victims: list[Request]) -> bool:
        return max(missing) <= 0 and bool(victims or self._kv.num_free_slots)
