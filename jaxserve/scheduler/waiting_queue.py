"""The waiting requests in the order of the policy, and the reasons for which a request waits.

A request that waits rises in priority with time, so that none waits for ever.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator

from jaxserve.scheduler.tenants import TenantShares, tenant_of
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import Request, RequestStatus

_Entry = tuple[int, float, int, Request]


def age_of(request: Request) -> tuple[int, float]:
    """Return the sort key by age: the oldest request comes first."""
    return request.queued_step, request.arrival


class Aging:
    """Finds the requests to age, which have no first token `aging_steps` steps after they were queued.

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


WINDOW = 128  # requests of a class that are sorted against each other; sorting thousands costs more than it gains
MAX_AGED_TRIED = 64  # aged requests whose priority counts for the best one

MatchLength = Callable[[Request], int]


class WaitingQueue:
    """Waiting requests, ordered by arrival within a class.

    There is one class per priority (see SchedulerConfig.rank), with a queue for each tenant.

    num_tokens    prompt tokens that wait
    num_online    waiting requests that are not batch requests

    The cost of taking the first requests does not depend on the length of the queue or the number of priorities.
    """

    def __init__(self, config: SchedulerConfig, match_length: MatchLength, tenants: TenantShares) -> None:
        self.num_tokens = 0
        self.num_online = 0
        self._num_requests = 0
        self._by_prefix = config.policy == "lpm"
        self._batch_priority = config.rank(BACKGROUND_PRIORITY)
        self._match_length = match_length
        self._tenants = tenants
        self._aging = Aging(config)
        self._aged: list[Request] = []  # the oldest first
        self._classes: dict[int, dict[str, OrderedDict[str, Request]]] = {}  # priority -> tenant -> id -> request
        self._priorities: list[int] = []  # the keys of _classes, ascending

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        yield from self._aged
        for queues in self._classes.values():
            for waiting in queues.values():
                yield from waiting.values()

    def counts(self) -> dict[str, int]:
        """Return the gauges of the queue, by their names in SchedulerStats."""
        return {
            "num_waiting": len(self),
            "num_preempted": sum(request.status is RequestStatus.PREEMPTED for request in self),
            "num_waiting_tokens": self.num_tokens,
        }

    def check_integrity(self) -> list[Request]:
        """Return the waiting requests. Raises AssertionError unless each of them can wait and is counted."""
        waiting = list(self)
        assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting)
        assert self.num_tokens == sum(r.num_prompt_tokens for r in waiting)
        return waiting

    @property
    def best_priority(self) -> int | None:
        """Best priority of the waiting requests that are tried first; None if no request waits."""
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

    def candidates(self, *, batch: bool = True, only: Collection[str] | None = None) -> Iterator[Request]:
        """Iterate over all requests in the order of the policy. Do not change the queue during the iteration.

        batch: include batch requests that are not aged. only: ids of the requests to include; None: all. Excluded
        requests do not count in the limits of their tenants.
        """
        aged = self._aged if only is None else list(_those(only, self._aged))
        within: list[Request] = []  # aged requests that pass only requests of their own priority and tenant
        if self._tenants.several:
            within = [request for request in aged if request.priority < self._batch_priority]
            aged = [request for request in aged if request.priority >= self._batch_priority]
        yield from filter(self._tenants.may_start, aged)
        priorities = self._priorities
        if within:
            priorities = sorted({*priorities, *(request.priority for request in within)})
        for priority in priorities:
            if priority >= self._batch_priority and not batch:
                return
            queues = {name: self._in_order(queue, only) for name, queue in self._classes.get(priority, {}).items()}
            for name, group in _by_tenant(request for request in within if request.priority == priority).items():
                queues[name] = itertools.chain(group, queues.get(name, ()))
            yield from self._tenants.interleaved(queues)

    def first(self, count: int) -> list[Request]:
        """Return at most `count` requests in the order of the policy; last, requests of tenants that are at a limit."""
        found = dict.fromkeys(itertools.islice(self.candidates(), count))
        for request in self if len(found) < count else ():
            found.setdefault(request)
        return list(itertools.islice(found, count))

    def _in_order(self, queue: OrderedDict[str, Request], only: Collection[str] | None) -> Iterator[Request]:
        """Iterate over the requests of one priority and tenant in the order of the policy."""
        waiting = _those(only, queue.values())
        if not self._by_prefix:
            return waiting
        return itertools.chain(sorted(itertools.islice(waiting, WINDOW), key=self._prefix_rank), waiting)

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
            self._classes[key] = {}
            bisect.insort(self._priorities, key)
        queue = self._classes[key].setdefault(tenant_of(request).name, OrderedDict())
        queue[request.request_id] = request
        if first:
            queue.move_to_end(request.request_id, last=False)

    def _delete(self, request: Request) -> None:
        if request.aged:
            self._aged.remove(request)
            return
        key, name = request.priority, tenant_of(request).name
        queues = self._classes[key]
        del queues[name][request.request_id]
        if not queues[name]:
            del queues[name]
        if not queues:
            del self._classes[key]
            del self._priorities[bisect.bisect_left(self._priorities, key)]


def _those(only: Collection[str] | None, requests: Iterable[Request]) -> Iterator[Request]:
    return iter(requests) if only is None else (request for request in requests if request.request_id in only)


def _by_tenant(requests: Iterable[Request]) -> dict[str, list[Request]]:
    found: dict[str, list[Request]] = {}
    for request in requests:
        found.setdefault(tenant_of(request).name, []).append(request)
    return found


class WaitReason(enum.StrEnum):
    """The reason for which a request has no slot. Operators read the value."""

    GRAMMAR = "its grammar is being compiled"
    ISOLATION = "requests are tried one by one to find the one that makes the device fail"
    ONLINE_FIRST = "it is a batch request, and online requests run first"
    SHARED_PREFIX = "another request computes the prefix that it shares"
    LOADING = "its pages are being loaded from the memory of the host"
    LAST_STEP = "the step that it ran in before it was preempted is not read yet"
    SLOT = "a free slot (scheduler.max_num_seqs)"
    KEY_LIMIT = "other requests of its API key to end (max_running of the key)"
    ADAPTER = "a free slot for its adapter (lora.slots)"
    PAGES = "free KV pages (cache.num_pages)"
    ROOM_BEFORE = "its turn: a request before it in the queue waits for room"
    TOKENS = "its turn: prompts before it take the tokens of a step (scheduler.max_num_batched_tokens)"
