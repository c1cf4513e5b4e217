"""The requests that wait, and the order in which they are tried: fcfs, lpm or priority.

Within every policy a preempted request comes before those that never ran, and one that has waited `aging_steps`
scheduler steps comes before all others, so that nothing starves.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from jaxserve.engine.request import Request, RequestStatus

WINDOW = 128  # requests of a class that are compared with each other; thousands would cost more than they bring

MatchLength = Callable[[Request], int]


class WaitingQueue:
    """Ordered by arrival within a class: one class a priority (see SchedulerConfig.rank)."""

    def __init__(self, policy: str, aging_steps: int, match_length: MatchLength) -> None:
        self.num_tokens = 0  # prompt tokens that wait
        self._by_prefix = policy == "lpm"
        self._ages = policy != "fcfs"
        self._aging_steps = aging_steps
        self._match_length = match_length
        self._classes: dict[int, OrderedDict[str, Request]] = {}

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._classes.values())

    def __iter__(self) -> Iterator[Request]:
        for waiting in self._classes.values():
            yield from waiting.values()

    @property
    def best_priority(self) -> int | None:
        """None if nobody waits."""
        return min(self._classes, default=None)

    def push(self, request: Request) -> None:
        self.num_tokens += request.num_prompt_tokens
        self._classes.setdefault(request.priority, OrderedDict())[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """Put a preempted request before all of its class."""
        self.push(request)
        self._classes[request.priority].move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        self.num_tokens -= request.num_prompt_tokens
        key = request.priority
        del self._classes[key][request.request_id]
        if not self._classes[key]:
            del self._classes[key]

    def candidates(self, step: int) -> Iterator[Request]:
        """All requests in the order of the policy. The queue must not change meanwhile."""
        yield from self._aged(step)
        for key in sorted(self._classes):
            waiting = (request for request in self._classes[key].values() if not request.aged)
            if self._by_prefix:
                yield from sorted(itertools.islice(waiting, WINDOW), key=self._prefix_rank)
            yield from waiting

    def _aged(self, step: int) -> list[Request]:
        """Mark those that have waited too long; under fcfs nobody is passed but background work, which may be."""
        if not self._ages:
            return []
        aged: list[Request] = []
        for waiting in self._classes.values():
            for request in itertools.islice(waiting.values(), WINDOW):
                if step - request.queued_step >= self._aging_steps:
                    request.aged = True
                    aged.append(request)
                elif request.status is RequestStatus.WAITING:
                    break  # the rest of the class came later
        return sorted(aged, key=lambda request: (request.queued_step, request.arrival))

    def _prefix_rank(self, request: Request) -> tuple[int, int]:
        if request.status is RequestStatus.PREEMPTED:
            return (0, 0)
        return (1, -self._match_length(request))
