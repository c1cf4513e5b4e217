"""Admission: which waiting requests start, which running ones are preempted for them, and how prompts share a step.

    NewTokenRatio, Room    estimate the tokens that running requests will still need, and the room for one more
    PrefillsInProgress     knows the prefills that are worth waiting for; like the estimates it changes no request
    Preemption             preempts running requests if decoding requests lack pages, or a better request has no room
    Admitter               gives waiting requests a slot and the pages of all their known tokens while there is room
    Refusals               records why the others wait
    PromptShares           divides the prompt tokens of one step among prompts; knows no pages and no device

Half of the tokens go to prompts in this order: aged first, then by priority, by the tokens that the tenant was served,
and by arrival. The other half goes to the prompts of the best priority and tenant with the fewest tokens left, so that
a short prompt does not wait for a long one. Tokens that one half does not need go to the other half.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from jaxserve.kv.kv_manager import KVManager
from jaxserve.kv.radix_cache import Node
from jaxserve.scheduler.adapter_slots import AdapterSlots
from jaxserve.scheduler.running_set import RunningSet
from jaxserve.scheduler.scheduler_stats import Counters
from jaxserve.scheduler.step_builder import pages_wanted
from jaxserve.scheduler.tenants import TenantKey, TenantShares
from jaxserve.scheduler.waiting_queue import WaitingQueue, WaitReason
from jaxserve.types.step import Request, RequestStatus

logger = logging.getLogger(__name__)

CLIP_NEW_TOKENS = 4096  # reserve no more of a larger max_tokens, because few outputs are that long
FLOOR_FACTOR = 0.14  # lower bound of the ratio, as a share of its start value
DECAY_STEPS = 600  # decode steps from the start value to the floor
MAX_STALL = 16  # steps; do not wait for a prefill that was in none of the last MAX_STALL steps
MARGIN_STEPS = 20  # decode steps without another preemption that one preemption should buy


_Key = tuple[Node, tuple[int, ...]]


class NewTokenRatio:
    """The share of its remaining max_tokens that a request is expected to generate.

    Decays with each decode step and rises to the observed share when pages run out. A low value means more requests at
    once, a high value means fewer preemptions. The scheme and its constants come from SGLang's scheduler.
    """

    def __init__(self, start: float) -> None:
        self.value = start
        self._start = start
        self._floor = start * FLOOR_FACTOR
        self._decay = (start - self._floor) / DECAY_STEPS

    def decay(self) -> None:
        self.value = max(self._floor, self.value - self._decay)

    def reset(self) -> None:
        self.value = self._start

    def rise(self, kept: Iterable[Request]) -> None:
        """Raise the ratio after pages ran out. `kept`: the requests that keep running."""
        decoded = total = 0
        for request in kept:
            decoded += len(request.output_token_ids) + MARGIN_STEPS
            total += request.max_tokens
        self.value = min(1.0, max(self.value, decoded / (total + 1)))

    def reserve(self, requests: Iterable[Request]) -> int:
        """Return the number of tokens that these requests are expected to generate from now on.

        A request that no stop token can end counts with all its remaining tokens.
        """
        certain = likely = 0
        for request in requests:
            left = request.max_tokens - len(request.output_token_ids)
            if not request.stop_token_ids:
                certain += left
            else:
                likely += left if left < CLIP_NEW_TOKENS else CLIP_NEW_TOKENS
        return certain + math.ceil(likely * self.value)


class Room:
    """Token counts per layer group, group 0 first: how many running requests will take, how many are missing."""

    def __init__(self, ratio: NewTokenRatio, kv: KVManager) -> None:
        self.ratio = ratio
        self.kv = kv

    def reserve(self, requests: Iterable[Request]) -> list[int]:
        """Return the tokens by which requests are expected to grow, at most to what each group can hold of them."""
        reserved = [self.ratio.reserve(requests)]
        size = self.kv.page_size
        for group in self.kv.groups:
            growth = [(request, group.num_to_grow(request, request.cache_node) * size) for request in requests]
            reserved.append(sum(min(self.ratio.reserve((request,)), room) for request, room in growth if room))
        return reserved

    def missing(self, request: Request, node: Node, reserved: list[int], *, alone: bool) -> list[int]:
        """Return the token deficit of each layer group if this request were admitted on top of `reserved`.

        A negative value means that much is free. If no other request runs, no reserve for growth is needed.
        """
        pairs = zip(self.kv.available(), self.kv.num_new_pages(request, node), strict=True)
        room = [(available - new) * self.kv.page_size for available, new in pairs]
        if min(room) >= 0 and alone:
            return [-there for there in room]
        groups = zip(reserved, self.reserve((request,)), room, strict=True)
        return [others + own - there for others, own, there in groups]


class PrefillsInProgress:
    """Prompts being computed whose pages a waiting request could soon share, as the siblings of one n > 1 request do.

    A prompt is found by the pages that follow its cached ones: the key is (cache_node, the next page's tokens).
    Siblings are found by the id of the request that they belong to.
    served, num_usable: of the KVManager, if layers with a recurrent state use fewer pages than are cached
    """

    def __init__(
        self,
        page_size: int,
        prefix_cache: bool,
        served: Callable[[Node], Node] = lambda node: node,
        num_usable: Callable[[Request, int], int] = lambda _, num_pages: num_pages,
    ) -> None:
        self._page_size = page_size
        self._served = served
        self._num_usable = num_usable
        self._prefix_cache = prefix_cache
        self._leaders: dict[_Key, Request] = {}
        self._keys: dict[Request, _Key | None] = {}
        self._started: dict[Request, int] = {}  # step in which a request started
        self._siblings: dict[str, Request] = {}  # by group id: the last sibling that started
        self._by_id: dict[str, Request] = {}

    def add(self, request: Request, step: int) -> None:
        """Add a request that starts in this step."""
        if self._prefix_cache:
            self._started[request] = step
            self._siblings[request.group] = request
            self._by_id[request.request_id] = request
            self._register(request)

    def advance(self, request: Request) -> None:
        """Update a prompt after more of its pages were cached."""
        if request in self._started:
            self._unregister(request)
            self._register(request)

    def remove(self, request: Request) -> None:
        """Remove a prompt: all its pages are cached, or they never will be."""
        if self._started.pop(request, None) is not None:
            self._unregister(request)
            self._by_id.pop(request.request_id, None)
            if self._siblings.get(request.group) is request:
                del self._siblings[request.group]

    def _register(self, request: Request) -> None:
        key = self._keys[request] = self._key(request, request.cache_node)
        if key is not None:
            self._leaders[key] = request

    def _unregister(self, request: Request) -> None:
        key = self._keys.pop(request)
        if key is not None and self._leaders.get(key) is request:
            del self._leaders[key]

    def awaits_prefill(self, request: Request, step: int) -> bool:
        """Return whether it is worth waiting for the prefill of a sibling, or of a prompt compared with it before.

        Does not read the prompt. A sibling is also the hint for the request's next match in the prefix cache.
        """
        sibling = self._siblings.get(request.group) if request.group else None
        if sibling is not None and sibling.prompt_token_ids is request.prompt_token_ids:
            node = sibling.cache_node
            # If a sibling is computed again, its deeper pages hold its own output.
            if request.slot is None and node.depth * self._page_size <= len(request.prompt_token_ids):
                request.cache_node = node
            return self._is_worth(request, sibling, self._served(node).depth, step)
        known = self._by_id.get(request.shared_with[0]) if request.shared_with else None
        return known is not None and self._is_worth(request, known, self._served(known.cache_node).depth, step)

    def worth_waiting(self, request: Request, node: Node, step: int) -> bool:
        """Return whether a prefill in progress saves `request` at least half the tokens that it still has to compute.

        The request waits only until the pages that both prompts share are computed.
        """
        leader = self._leader(request, node) if self._leaders else None
        return leader is not None and self._is_worth(request, leader, node.depth, step)

    def _leader(self, request: Request, node: Node) -> Request | None:
        """Return the prompt that computes the page after those that were found, or with recurrent states one of these.

        node: where the request could begin. Such a prompt begins where a state is, and comes by the pages behind it.
        """
        found: Node = request.matched_node or node
        key = self._key(request, found)
        leader = self._leaders.get(key) if key else None
        places = {place for place, _ in self._leaders} if found is not node else ()
        while leader is None and found is not node:
            assert found.parent is not None and not isinstance(found.key, str)
            if found.parent in places:
                leader = self._leaders.get((found.parent, found.key))
            found = found.parent
        return leader

    def _is_worth(self, request: Request, leader: Request, depth: int, step: int) -> bool:
        """depth: number of cached pages that both prompts share"""
        if request.reads_whole_prompt or leader.priority > request.priority:
            return False  # a leader of worse priority may itself be waiting for this request
        if max(leader.last_step, self._started[leader]) < step - MAX_STALL:
            return False
        usable = self._num_usable(leader, self._num_shared(request, leader, depth))
        gain = (usable - depth) * self._page_size
        return gain > 0 and 2 * gain >= request.num_tokens - depth * self._page_size

    def _key(self, request: Request, node: Node) -> _Key | None:
        begin, end = node.depth * self._page_size, (node.depth + 1) * self._page_size
        prompt = request.prompt_keys
        return (node, tuple(prompt[begin:end])) if end <= len(prompt) else None

    def _num_shared(self, request: Request, leader: Request, depth: int) -> int:
        """Return how many pages both prompts share and `request` could use. The first `depth` are known to be equal."""
        mine, theirs, size = request.prompt_keys, leader.prompt_keys, self._page_size
        limit = min((request.num_tokens - 1) // size, len(mine) // size, len(theirs) // size)
        if mine is theirs:
            return limit
        known = request.shared_with
        if known is not None and known[0] == leader.request_id:
            return min(limit, known[1])
        page = depth
        while page < limit and mine[page * size : (page + 1) * size] == theirs[page * size : (page + 1) * size]:
            page += 1
        request.shared_with = leader.request_id, page
        return page


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
            self._preempt_for_pages([wanted - left for left in self._kv.growable()], num_waiting)

    def _preempt_for_pages(self, missing: list[int], num_waiting: int) -> None:
        """Preempt the requests with the least progress until each layer group has the pages that it lacks.

        The request with the most progress always stays.
        """
        kept = self._running.best_first()
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
        """Preempt worse requests if that makes room for `request`.

        A request is worse if its priority is, or if its tenant has more than its share.

        missing: token deficit of each layer group
        started: requests that got their slot in this step; they keep it
        """
        claim = self.tenants.claim(request, self._running, self._kv.page_size)
        if self._kv.has_leaving or not (claim or self.could_help(request.priority)):
            return
        victims: list[Request] = []
        for victim in reversed(self._running.best_first()):
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


MAX_LOOKUPS = 64  # waiting requests that are looked up in the prefix cache per step
# of these, the shortest prompts from further back, so that a row of long prompts does not block a short one
MAX_SHORT = 8
MAX_SCANNED = 1024  # waiting requests that are scanned to find the short ones, at 1 us each
# Pages of the requests that start in one step, at 1 us each. The first request may have more. Without this limit, 64
# siblings of a prompt of 100,000 tokens would hold up a step for 0.3 s.
MAX_PAGES_TAKEN = 16_384


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
        adapters: AdapterSlots,
    ) -> None:
        self._kv = kv
        self._adapters = adapters
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
        self._pages_taken = 0  # pages of the requests that started in this step
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
        self._adapters.begin_step()
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
            self._refusals.record(request, WaitReason.SHARED_PREFIX)
        return awaits

    def _may_find_room(self) -> bool:
        if not self._waiting:
            return False
        if self._tenants.some_may_start(self._kv.num_free_slots):
            return True
        best = self._waiting.best_priority
        return best is not None and self._preemption.could_help(best)

    def num_cached(self, request: Request) -> int:
        """Return the number of tokens of a waiting request that the prefix cache holds."""
        if self._blocked or request.slot is not None:
            return 0
        return self._kv.match(request).depth * self._kv.page_size

    def arrived(self, request: Request) -> None:
        """Record why a queued request waits if no slot is free, because then it is not tried."""
        if not self._kv.num_free_slots:
            self._refusals.record(request, WaitReason.SLOT)

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
            self._refusals.record(request, WaitReason.KEY_LIMIT)
            return False
        in_flight = request.slot is not None  # preempted, and a step with it has not been read
        if in_flight or self._pages_taken >= MAX_PAGES_TAKEN:
            self._refusals.record(request, WaitReason.LAST_STEP if in_flight else WaitReason.TOKENS)
            self._blocked = True
            return False
        if not self._adapters.try_admit(request):
            self._refusals.record(request, WaitReason.ADAPTER)
            return False
        kept = self._kv.num_free_slots == 1 and self._tenants.keeps_last_slot(request)
        node = self._kv.match(request)
        if not request.aged and self._prefills.worth_waiting(request, node, self._step):
            self._refusals.record(request, WaitReason.SHARED_PREFIX)
            return False
        missing = self._room.missing(request, node, self._reserved, alone=not self._running)
        if max(missing) > 0 or kept or not self._kv.num_free_slots or self._aged_lack:
            has_slot = self._kv.num_free_slots and not kept
            self._refusals.record(request, WaitReason.PAGES if has_slot else WaitReason.SLOT)
            self._make_room(request, missing)
            return False
        if self._running and self._kv.load_ahead(request, node):
            self._refusals.record(request, WaitReason.LOADING)
            return False
        self._take(request, node, [-lacking // self._kv.page_size for lacking in missing[1:]])
        return True

    def _make_room(self, request: Request, missing: list[int]) -> None:
        """Preempt worse requests for a request that found no room. missing: its token deficit in each group

        An aged request gets the room that comes free. The requests behind it may still preempt worse requests, or an
        aged batch request would keep online requests waiting until other batch requests end.
        """
        lack = self._aged_lack or [0] * len(missing)
        wanted = [own + aged for own, aged in zip(missing, lack, strict=True)]
        self._preemption.preempt_for(request, wanted, self.started)
        if request.aged and not self._tenants.several:
            self._aged_lack = [aged + max(0, own) for own, aged in zip(missing, lack, strict=True)]
        else:
            self._blocked = True

    def _take(self, request: Request, node: Node, surplus: Sequence[int]) -> None:
        """Start a request. surplus: as in KVManager.take"""
        num_left = max(0, request.num_prefill_tokens - request.num_computed_tokens)
        self._waiting.remove(request)
        self._kv.take(request, node, surplus)
        self._adapters.assign(request)
        self._pages_taken += request.num_tokens // self._kv.page_size
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_read_tokens
        request.num_prefill_tokens = request.num_tokens
        request.prompt_done = False
        if request.admitted is None:
            request.admitted = self._now
            found = min(request.num_computed_tokens, request.num_prompt_tokens)
            request.num_cached_tokens = found if request.prefilled is None else request.prefilled.num_cached_tokens
            if request.matched_node is not None:
                missed = request.matched_node.depth - node.depth
                self._counters.stateless_tokens += missed * self._kv.page_size
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

    def record(self, request: Request, reason: WaitReason) -> None:
        """Record that the request could not start in this step."""
        self._now[request.request_id] = reason
        if self._before.get(request.request_id) is not reason:
            logger.debug("request %s waits: %s", request.request_id, reason.value)

    def of(self, request: Request) -> WaitReason | None:
        """Return the reason of the last step; None if the request was not tried in it."""
        return self._now.get(request.request_id)


@dataclass(frozen=True, slots=True)
class PromptShares:
    """Divides a token budget among running prompts and waiting requests. Starts waiting requests that receive tokens.

    start          gives a waiting request its slot and its pages; returns whether there was room
    num_cached     returns the tokens of a waiting request that the prefix cache holds
    reach          returns the position, at most the given one, up to which a running prompt has pages in this step
    tenant_key     returns the sort key of a request before its arrival: aged, priority, tenant
    whole_prompts  a prompt is computed in one step; prompts run in order of arrival up to the first that does not fit
    """

    start: Callable[[Request], bool]
    num_cached: Callable[[Request], int]
    reach: Callable[[Request, int], int]
    tenant_key: Callable[[Request], TenantKey]
    whole_prompts: bool = False

    def divide(
        self, budget: int, running: Sequence[Request], waiting: Sequence[Request], step: int
    ) -> dict[Request, int]:
        """Return the number of tokens of each prompt in this step. A prompt with tokens left after it comes last.

        running: prompts in any order. waiting: requests in the order of the policy
        """
        shares: dict[Request, int] = {}
        in_order = heapq.merge(sorted(running, key=self._order), waiting, key=self._order)
        # Alternate between rounding up and down, so that a budget of one token serves both halves.
        half = budget if self.whole_prompts else (budget + step % 2) // 2
        left = budget - self._serve(in_order, half, shares)
        if left and not self.whole_prompts:
            shortest = sorted((*running, *waiting), key=self._shortest_first)
            self._serve(shortest, left, shares)
        given = [(request, tokens) for request, tokens in shares.items() if tokens and _runs(request)]
        return dict(sorted(given, key=lambda share: self._rest(*share)))

    def _serve(self, prompts: Iterable[Request], budget: int, shares: dict[Request, int]) -> int:
        """Give each prompt the tokens that it can use until the budget is spent. Return the number of tokens given."""
        left = budget
        for request in prompts:
            if left <= 0:
                break
            if not _runs(request):
                if self.whole_prompts and request.num_tokens > left:
                    break
                if request in shares or not self.start(request):
                    shares[request] = 0  # try each request once per step
                    continue
            given = shares.get(request, 0)
            start = request.num_computed_tokens + given
            tokens = self.reach(request, min(start + left, request.num_prefill_tokens)) - start
            shares[request] = given + tokens
            left -= tokens
        return budget - left

    def _order(self, request: Request) -> tuple[TenantKey, float]:
        return self.tenant_key(request), request.arrival

    def _shortest_first(self, request: Request) -> tuple[int, tuple[int, float], int, float]:
        """Sort key: priority, tokens that the tenant was served, tokens left, arrival."""
        if _runs(request):
            left = request.num_prefill_tokens - request.num_computed_tokens
        else:
            left = request.num_tokens - self.num_cached(request)
        _, priority, rank = self.tenant_key(request)
        return priority, rank, left, request.arrival

    def _rest(self, request: Request, tokens: int) -> int:
        return request.num_prefill_tokens - request.num_computed_tokens - tokens


def _runs(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING
