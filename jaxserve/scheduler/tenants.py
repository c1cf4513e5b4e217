"""Fair sharing between tenants: whose request is tried next, and whose request may be preempted.

Each tenant has a count of served tokens, divided by its weight. The tenant with the least count is tried first (the
virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588). A tenant that
returns after a pause starts at the least count of the tenants that are there, so it saves up nothing. Counts that
differ by less than the tokens of a step are equal; then the tenant with fewer running requests comes first.

That decides who starts. It does not help if others hold every slot with long requests. So a tenant that holds less
than its share of slots and pages may also preempt requests of a tenant that holds more than its share. The share is the
weight over the weights of the tenants that have requests. It counts the scarcer of the two resources, as in Ghodsi et
al., "Dominant Resource Fairness" (NSDI 2011). A preemption takes a step or two, so the last slot is kept for a tenant
with less than its share.

With one tenant all of this is skipped.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxserve.types.sampling import Tenant
from jaxserve.types.step import Request, ScheduledRow

MIN_SLOTS = 8  # an engine with fewer does without keeping one

_DEFAULT = Tenant()
TenantKey = tuple[bool, int, tuple[int, float]]


def tenant_of(request: Request) -> Tenant:
    return request.tenant or _DEFAULT


@dataclass(slots=True)
class _Account:
    """The tokens that one tenant was served, and its live requests.

    served: tokens divided by the tenant's weight. quantum: tokens of a step; `rank` treats counts within one quantum as
    equal. num_live: requests that wait or run
    """

    tenant: Tenant
    quantum: int
    served: float = 0.0
    num_live: int = 0
    num_running: int = 0

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: the tenant that was served least comes first."""
        return int(self.served / self.quantum), self.num_running / self.tenant.weight

    @property
    def num_startable(self) -> int | None:
        """Number of requests that may start now; None: no limit."""
        most = self.tenant.max_running
        return None if most is None else max(0, most - self.num_running)


class TenantShares:
    """The accounts of all tenants. There are as many as configured API keys.

    several: requests of more than one tenant wait or run
    counts: there has been more than one tenant, so `charge` must be called
    num_slots, num_pages: size of the engine. quantum: tokens of a step
    """

    def __init__(self, num_slots: int, num_pages: int, quantum: int) -> None:
        self.several = self.counts = False
        self._quantum = quantum
        self._num_slots = num_slots
        self._num_pages = num_pages
        self._accounts: dict[str, _Account] = {}
        self._live: dict[str, _Account] = {}  # accounts with requests

    def add(self, request: Request) -> None:
        """Count a request that was queued."""
        tenant = tenant_of(request)
        account = self._accounts.setdefault(tenant.name, _Account(tenant, self._quantum))
        account.tenant = tenant
        self.counts = len(self._accounts) > 1
        if not account.num_live:
            least = min((each.served for each in self._live.values()), default=account.served)
            account.served = max(account.served, least)
            self._live[tenant.name] = account
            self.several = len(self._live) > 1
        account.num_live += 1

    def remove(self, request: Request) -> None:
        """Count a request that has ended."""
        account = self._account(request)
        account.num_live -= 1
        if not account.num_live:
            del self._live[account.tenant.name]
            self.several = len(self._live) > 1

    def started(self, request: Request) -> None:
        """Count a request that got a slot."""
        self._account(request).num_running += 1

    def left(self, request: Request) -> None:
        """Count a request that gave up its slot."""
        self._account(request).num_running -= 1

    def charge(self, rows: Sequence[ScheduledRow], requests: Sequence[Request]) -> None:
        """Count the tokens of a step's rows, drafts included. Tokens that are computed again cost nothing.

        requests: the requests of the rows
        """
        for row, request in zip(rows, requests, strict=True):
            if not (request.num_preemptions and request.num_inflight_tokens == 0):
                account = self._account(request)
                account.served += (row.num_tokens + len(row.drafts)) / account.tenant.weight

    def key_of(self, request: Request) -> TenantKey:
        """Return the sort key of prompts: aged, better priority, the tenant that was served least.

        Among several tenants an aged request does not pass the requests of others.
        """
        if self.several:
            return False, request.priority, self._account(request).rank
        return not request.aged, request.priority, (0, 0.0)

    def limit(self, budget: int, prompts: Sequence[Request], before: int) -> int:
        """Return how many of `budget` prompt tokens a step may have.

        The limit is twice the prompt tokens of the tenant that is first, so that its first token does not wait for
        another tenant's chunk beside the chunk in flight. It does not apply after a step that was limited, or long
        prompts would be computed in small pieces beside many short ones.

        prompts: requests that may be computed. before: prompt tokens of the step before
        """
        if not (self.several and prompts):
            return budget
        first = tenant_of(min(prompts, key=self.key_of))
        limited = 2 * sum(_num_left(request) for request in prompts if tenant_of(request) == first)
        return limited if before > limited else budget

    def may_start(self, request: Request) -> bool:
        """Return whether the tenant's limit on running requests allows another one."""
        return self._account(request).num_startable != 0

    def keeps_last_slot(self, request: Request) -> bool:
        """Return whether the request must leave the last free slot to other tenants.

        It must if its tenant would otherwise exceed its share of the slots.
        """
        return self.counts and self._num_slots >= MIN_SLOTS and not self._is_below(self._account(request))

    def some_may_start(self, num_free_slots: int) -> bool:
        """Return whether the free slots, or a claim on another tenant's slots, may let a waiting request start."""
        if num_free_slots > 1 or not self.counts or self._num_slots < MIN_SLOTS:
            return num_free_slots > 0 or (self.several and self._some_claim())
        waiting = (account for account in self._live.values() if account.num_live > account.num_running)
        return any(map(self._is_below, waiting)) and (num_free_slots > 0 or self._some_claim())

    def _some_claim(self) -> bool:
        accounts = self._live.values()
        over = [each.rank[0] for each in accounts if each.num_running > self._share(each) * self._num_slots]
        return any(
            account.num_live > account.num_running and self._is_below(account) and account.rank[0] <= max(over)
            for account in accounts
            if over
        )

    def _is_below(self, account: _Account) -> bool:
        """Return whether a tenant may run one more: it runs none, or stays within its share of all slots but one."""
        return not account.num_running or account.num_running + 1 <= self._share(account) * (self._num_slots - 1)

    def _share(self, account: _Account) -> float:
        total = sum(each.tenant.weight for each in self._live.values())
        return account.tenant.weight / total

    def interleaved(self, queues: Mapping[str, Iterator[Request]]) -> Iterator[Request]:
        """Interleave the queues of the tenants by their rank, each request counted as if it were served.

        A queue ends where the tenant's limit on running requests is reached.
        """
        if len(queues) == 1:
            (name,) = queues
            yield from itertools.islice(queues[name], self._accounts[name].num_startable)
            return
        accounts = [replace(self._accounts[name]) for name in queues]
        waiting = [itertools.islice(queues[each.tenant.name], each.num_startable) for each in accounts]
        line = [(account.rank, place) for place, account in enumerate(accounts)]
        heapq.heapify(line)
        while line:
            _, place = heapq.heappop(line)
            account, request = accounts[place], next(waiting[place], None)
            if request is not None:
                yield request
                account.served += request.num_tokens / account.tenant.weight
                account.num_running += 1
                heapq.heappush(line, (account.rank, place))

    def claim(self, request: Request, running: Iterable[Request], page_size: int) -> Claim | None:
        """Return which running requests may be preempted for a waiting one; None: none may."""
        if not self.several:
            return None
        held = {
            name: _Held(account.rank[0], self._share(account), self._num_slots, self._num_pages)
            for name, account in self._live.items()
        }
        for each in running:
            held[tenant_of(each).name].add(1, len(each.page_ids))
        own = held[tenant_of(request).name]
        if own.slots:
            own.add(1, -(-request.num_tokens // page_size))
            if own.usage > own.share:
                return None
        return Claim(held, own)

    def _account(self, request: Request) -> _Account:
        return self._accounts[tenant_of(request).name]


def _num_left(request: Request) -> int:
    """Return the prompt tokens that are left to compute. A waiting request has all of them left, cached or not."""
    if request.slot is None:
        return request.num_tokens
    return request.num_prefill_tokens - request.num_computed_tokens


@dataclass(slots=True)
class _Held:
    """The slots and pages that one tenant holds, and its share of the engine, from 0 to 1. served: in steps"""

    served: int
    share: float
    num_slots: int
    num_pages: int
    slots: int = 0
    pages: int = 0

    def add(self, slots: int, pages: int) -> None:
        self.slots += slots
        self.pages += pages

    @property
    def usage(self) -> float:
        """The larger of the two fractions of the engine's slots and pages."""
        return max(self.slots / self.num_slots, self.pages / self.num_pages)


class Claim:
    """The right of a waiting request to the room of tenants that hold more than their share and were served more."""

    def __init__(self, held: Mapping[str, _Held], own: _Held) -> None:
        self._held = held
        self._own = own

    def take(self, victim: Request) -> bool:
        """Return whether a running request may be preempted. If so, it counts as gone.

        The last request of a tenant stays, so tenants that outnumber the slots do not preempt each other.
        """
        held = self._held[tenant_of(victim).name]
        if held is self._own or held.slots < 2 or held.usage <= held.share or self._own.served > held.served:
            return False
        held.add(-1, -len(victim.page_ids))
        return True
