"""The waiting requests and the order in which they are tried: fcfs, lpm or priority.

Under every policy a preempted request comes before the others of its priority, and an aged one (see aging.py) comes
before all others.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from jaxserve.scheduler.aging import Aging, age_of
from jaxserve.types.request import Request, RequestStatus
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from jaxserve.types.scheduler_config import SchedulerConfig

WINDOW = 128  # requests of a class that are sorted against each other; sorting thousands costs more than it gains
MAX_AGED_TRIED = 64  # aged requests whose priority counts for the best one

MatchLength = Callable[[Request], int]


class WaitingQueue:
    """Waiting requests, ordered by arrival within a class. There is one class per priority (see SchedulerConfig.rank).

    num_tokens    prompt tokens that wait
    num_online    waiting requests that are not batch requests

    The cost of taking the first requests does not depend on the length of the queue or the number of priorities.
    """

    def __init__(self, config: SchedulerConfig, match_length: MatchLength) -> None:
        self.num_tokens = 0
        self.num_online = 0
        self._num_requests = 0
        self._by_prefix = config.policy == "lpm"
        self._batch_priority = config.rank(BACKGROUND_PRIORITY)
        self._match_length = match_length
        self._aging = Aging(config)
        self._aged: list[Request] = []  # the oldest first
        self._classes: dict[int, OrderedDict[str, Request]] = {}
        self._priorities: list[int] = []  # the keys of _classes, ascending

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        yield from self._aged
        for waiting in self._classes.values():
            yield from waiting.values()

    @property
    def best_priority(self) -> int | None:
        """The best priority of the waiting requests that are tried first. None if no request waits."""
        first = [request.priority for request in itertools.islice(self._aged, MAX_AGED_TRIED)]
        return min((*first, *self._priorities[:1]), default=None)

    def push(self, request: Request) -> None:
        self._count(request, 1)
        self._insert(request)

    def push_front(self, request: Request) -> None:
        """Put a request that ran before (preempted or resumed) in front of all others of its class."""
        self._count(request, 1)
        self._insert(request, first=True)

    def remove(self, request: Request) -> None:
        self._count(request, -1)
        self._delete(request)

    def age(self, step: int) -> None:
        """Mark the requests that have waited too long at this step. They may be waiting or computing their prompts."""
        for request in self._aging.due(step):
            if request.status is RequestStatus.RUNNING:
                request.aged = True
            else:
                self._delete(request)
                request.aged = True
                self._insert(request)

    def candidates(self, *, batch: bool = True) -> Iterator[Request]:
        """Iterate over all requests in the order of the policy. Do not change the queue during the iteration.

        batch: include batch requests that are not aged
        """
        yield from self._aged
        for priority in self._priorities:
            if priority >= self._batch_priority and not batch:
                return
            waiting = iter(self._classes[priority].values())
            if self._by_prefix:
                yield from sorted(itertools.islice(waiting, WINDOW), key=self._prefix_rank)
            yield from waiting

    def _prefix_rank(self, request: Request) -> tuple[int, int]:
        if request.status is RequestStatus.PREEMPTED:
            return (0, 0)
        return (1, -self._match_length(request))

    def _count(self, request: Request, change: int) -> None:
        self._num_requests += change
        self.num_tokens += change * request.num_prompt_tokens
        if request.priority < self._batch_priority:
            self.num_online += change

    def _insert(self, request: Request, *, first: bool = False) -> None:
        if request.aged:
            insert = bisect.insort_left if first else bisect.insort_right
            insert(self._aged, request, key=age_of)
            return
        self._aging.watch(request)
        key = request.priority
        if key not in self._classes:
            self._classes[key] = OrderedDict()
            bisect.insort(self._priorities, key)
        self._classes[key][request.request_id] = request
        if first:
            self._classes[key].move_to_end(request.request_id, last=False)

    def _delete(self, request: Request) -> None:
        if request.aged:
            self._aged.remove(request)
            return
        key = request.priority
        del self._classes[key][request.request_id]
        if not self._classes[key]:
            del self._classes[key]
            del self._priorities[bisect.bisect_left(self._priorities, key)]
