"""Starts waiting requests: assigns each a slot and the pages of all its known tokens, as long as there is room."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Collection

from jaxserve.kv.kv_manager import KVManager
from jaxserve.kv.radix_cache import Node
from jaxserve.scheduler.admission import PrefillsInProgress
from jaxserve.scheduler.preemption import Preemption
from jaxserve.scheduler.running_set import RunningSet
from jaxserve.scheduler.scheduler_stats import Counters
from jaxserve.scheduler.waiting.wait_reason import WaitReason
from jaxserve.scheduler.waiting.waiting_queue import WaitingQueue
from jaxserve.types.step import Request, RequestStatus

MAX_LOOKUPS = 64  # waiting requests that are looked up in the prefix cache per step
# of these, the shortest prompts from further back, so that a row of long prompts does not block a short one
MAX_SHORT = 8
MAX_SCANNED = 1024  # waiting requests that are scanned to find the short ones, at 1 us each
# Pages of the requests that start in one step, at 1 us each, but for the first request: 64 siblings of a prompt of
# 100,000 tokens would hold up a step for 0.3 s.
MAX_PAGES_TAKEN = 16_384


logger = logging.getLogger(__name__)


class Admitter:
    """Decides whether a waiting request can start now. The caller decides which one is tried next.

    started    the requests that were given a slot since `open`
    """

    def __init__(
        self,
        kv: KVManager,
        waiting: WaitingQueue,
        running: RunningSet,
        prefills: PrefillsInProgress,
        preemption: Preemption,
        counters: Counters,
    ) -> None:
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._prefills = prefills
        self._preemption = preemption
        self._counters = counters
        self._room = preemption.room
        self._tenants = preemption.tenants
        self._step = 0
        self._now = 0.0
        self._blocked = False  # a request found no room: no other may start before it
        self._pages_taken = 0  # by requests that started in this step
        self._aged_lack: list[int] = []  # tokens that aged requests lack in each group; empty: no aged one waits
        self._reserved: list[int] = []  # per layer group: tokens by which running requests are expected to grow
        self._refusals = Refusals()
        self.started: list[Request] = []

    def open(self, step: int, now: float, *, batch: bool, only: Collection[str] | None) -> list[Request]:
        """Return the waiting requests that may start in a step, in the order of the policy.

        now: seconds. batch: include batch requests. only: ids of the requests to include; None: all.
        """
        if step != self._step:
            self._refusals.open()
        self._step, self._now, self._blocked, self.started = step, now, False, []
        self._pages_taken, self._aged_lack = 0, []
        if not self._may_find_room():
            return []
        if not self._running:
            self._room.ratio.reset()
        self._reserved = self._room.reserve(self._running)
        candidates = (
            request for request in self._waiting.candidates(batch=batch, only=only) if not self._awaits_prefill(request)
        )
        return _first_and_shortest(list(itertools.islice(candidates, MAX_SCANNED)))

    def _awaits_prefill(self, request: Request) -> bool:
        awaits = not request.aged and self._prefills.awaits_prefill(request, self._step)
        if awaits:
            self._refusals.note(request, WaitReason.SHARED_PREFIX)
        return awaits

    def _may_find_room(self) -> bool:
        if self._tenants.some_may_start(self._kv.num_free_slots):
            return len(self._waiting) > 0
        best = self._waiting.best_priority
        return best is not None and self._preemption.could_help(best)

    def num_cached(self, request: Request) -> int:
        """Return the number of tokens of a waiting request that the prefix cache holds."""
        if self._blocked or request.slot is not None:
            return 0
        return self._kv.match(request).depth * self._kv.page_size

    def arrived(self, request: Request) -> None:
        """Note that a request was queued. If no slot is free, it is not tried, so its reason is noted here."""
        if not self._kv.num_free_slots:
            self._refusals.note(request, WaitReason.SLOT)

    def reason(self, request: Request) -> WaitReason:
        """Return why a waiting request could not start in the last step."""
        if (refused := self._refusals.of(request)) is not None:
            return refused
        if not self._tenants.may_start(request):
            return WaitReason.KEY_LIMIT
        if not self._kv.num_free_slots:
            return WaitReason.SLOT
        return WaitReason.ROOM_BEFORE if self._blocked else WaitReason.TOKENS

    def start(self, request: Request) -> bool:
        """Give a waiting request a slot and pages. Returns False if it has to wait.

        If there is no room, no other request can start before the next `open`, and running requests of worse
        priority may be preempted for it.
        """
        if self._blocked:
            return False
        if not self._tenants.may_start(request):  # others of its key have started since `open`
            self._refusals.note(request, WaitReason.KEY_LIMIT)
            return False
        in_flight = request.slot is not None  # preempted, and a step with it has not been read
        if in_flight or self._pages_taken >= MAX_PAGES_TAKEN:
            self._refusals.note(request, WaitReason.LAST_STEP if in_flight else WaitReason.TOKENS)
            self._blocked = True
            return False
        kept = self._kv.num_free_slots == 1 and self._tenants.keeps_last_slot(request)
        node = self._kv.match(request)
        if not request.aged and self._prefills.worth_waiting(request, node, self._step):
            self._refusals.note(request, WaitReason.SHARED_PREFIX)
            return False
        missing = self._room.missing(request, node, self._reserved, alone=not self._running)
        if max(missing) > 0 or kept or not self._kv.num_free_slots or self._aged_lack:
            has_slot = self._kv.num_free_slots and not kept
            self._refusals.note(request, WaitReason.PAGES if has_slot else WaitReason.SLOT)
            self._make_room(request, missing)
            return False
        if self._running and self._kv.load_ahead(request, node):
            self._refusals.note(request, WaitReason.LOADING)
            return False
        self._take(request, node, -missing[-1] // self._kv.page_size)
        return True

    def _make_room(self, request: Request, missing: list[int]) -> None:
        """Preempt worse requests for a request that found no room. missing: its token deficit in each group.

        An aged request gets the room that comes free. The requests behind it may still preempt worse ones: else an
        aged batch request would keep online requests waiting until other batch requests end.
        """
        lack = self._aged_lack or [0] * len(missing)
        wanted = [own + aged for own, aged in zip(missing, lack, strict=True)]
        self._preemption.preempt_for(request, wanted, self.started)
        if request.aged and not self._tenants.several:
            self._aged_lack = [aged + max(0, own) for own, aged in zip(missing, lack, strict=True)]
        else:
            self._blocked = True

    def _take(self, request: Request, node: Node, surplus: int) -> None:
        """surplus: see KVManager.take"""
        num_left = max(0, request.num_prefill_tokens - request.num_computed_tokens)
        self._waiting.remove(request)
        self._kv.take(request, node, surplus)
        self._pages_taken += request.num_tokens // self._kv.page_size
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_read_tokens
        request.num_prefill_tokens = request.num_tokens
        request.prompt_done = False
        if request.admitted is None:
            request.admitted = self._now
            found = min(request.num_computed_tokens, request.num_prompt_tokens)
            request.num_cached_tokens = found if request.prefilled is None else request.prefilled.num_cached_tokens
        self._tenants.started(request)
        self._prefills.add(request, self._step)
        self._running.prefilling.append(request)
        self._reserved = [a + b for a, b in zip(self._reserved, self._room.reserve((request,)), strict=True)]
        self._counters.count_admission(request, num_left)
        self.started.append(request)


def _first_and_shortest(requests: list[Request]) -> list[Request]:
    """Return at most MAX_LOOKUPS of the requests, in the same order."""
    if len(requests) <= MAX_LOOKUPS:
        return requests
    later = requests[MAX_LOOKUPS - MAX_SHORT :]
    shortest = set(heapq.nsmallest(MAX_SHORT, later, key=lambda request: (request.priority, request.num_tokens)))
    return requests[: MAX_LOOKUPS - MAX_SHORT] + [request for request in later if request in shortest]


class Refusals:
    """Why requests were refused a slot in the last step.

    Costs one dictionary entry for each request that was tried and refused. A debug line is written if a request's
    reason changes.
    """

    def __init__(self) -> None:
        self._now: dict[str, WaitReason] = {}
        self._before: dict[str, WaitReason] = {}

    def open(self) -> None:
        """Begin a new step."""
        self._before, self._now = self._now, {}

    def note(self, request: Request, reason: WaitReason) -> None:
        """Note that the request could not start in this step."""
        self._now[request.request_id] = reason
        if self._before.get(request.request_id) is not reason:
            logger.debug("request %s waits: %s", request.request_id, reason.value)

    def of(self, request: Request) -> WaitReason | None:
        """Return the reason of the last step; None if the request was not tried in it."""
        return self._now.get(request.request_id)
