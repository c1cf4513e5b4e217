"""Starvation protection. A request that has waited too long is `aged`: no other request may pass or preempt it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from jaxserve.types.sampling import BACKGROUND_PRIORITY
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import Request, RequestStatus

_Entry = tuple[int, float, int, Request]


def age_of(request: Request) -> tuple[int, float]:
    """Sort key: the oldest request first."""
    return request.queued_step, request.arrival


class Aging:
    """Finds requests to age: those without a first token `aging_steps` steps after they were queued.

    Under fcfs only batch requests age, because all other requests run in order of arrival anyway. At most one batch
    request is aged at a time. The next one follows `aging_steps` steps after the end of the last, so a long queue of
    batch requests makes progress without delaying online requests for all of it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._aging_steps = config.aging_steps
        self._online_ages = config.policy != "fcfs"
        self._batch_priority = config.rank(BACKGROUND_PRIORITY)
        self._online = _Watched()
        self._batch = _Watched()
        self._aged_batch: Request | None = None  # the batch request that is aged now
        self._batch_since = -config.aging_steps  # first step without an aged batch request

    def watch(self, request: Request) -> None:
        """Add a waiting request. If it was preempted, its age still counts from the first time that it was queued."""
        if request.priority >= self._batch_priority:
            self._batch.push(request)
        elif self._online_ages:
            self._online.push(request)

    def due(self, step: int) -> Iterator[Request]:
        """Remove and return the requests that reach the age limit at this step. The caller marks each as aged."""
        limit = step - self._aging_steps
        while (request := self._online.pop(limit)) is not None:
            yield request
        if self._aged_batch is not None and self._aged_batch.finished:
            self._aged_batch, self._batch_since = None, step
        if self._aged_batch is None and self._batch_since <= limit:
            self._aged_batch = self._batch.pop(limit)
            if self._aged_batch is not None:
                yield self._aged_batch


class _Watched:
    """Requests by age. Entries of requests that decode, are aged or have ended are dropped when they reach the top."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._ties = itertools.count()
        self._prune_at = 1024

    def push(self, request: Request) -> None:
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if _may_age(entry[3])]
            heapq.heapify(self._heap)
            self._prune_at = 2 * len(self._heap) + 1024
        heapq.heappush(self._heap, (*age_of(request), next(self._ties), request))

    def pop(self, limit: int) -> Request | None:
        """Remove and return the oldest request that was queued at step `limit` or before; None if there is none."""
        while self._heap and self._heap[0][0] <= limit:
            request = heapq.heappop(self._heap)[3]
            if _may_age(request):
                return request
        return None


def _may_age(request: Request) -> bool:
    """Return whether the request waits or computes its prompt."""
    if request.aged or request.status is RequestStatus.FINISHED:
        return False
    return request.status is not RequestStatus.RUNNING or request.num_computed_tokens < request.num_prefill_tokens
