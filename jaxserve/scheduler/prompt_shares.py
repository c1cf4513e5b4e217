"""Divides the prompt tokens of one step among prompts. Knows no pages and no device.

Half of the tokens go to prompts in this order: aged, then by priority, by what the tenant was served, and by arrival.
The other half goes to the prompts of the best priority and tenant with the fewest tokens left, so that a short prompt
does not wait for a long one. Tokens that one half does not need go to the other half.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxserve.scheduler.waiting.tenants import TenantKey
from jaxserve.types.step import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class PromptShares:
    """Divides a token budget among running prompts and waiting requests. Starts waiting requests that receive tokens.

    start       gives a waiting request its slot and its pages; returns whether there was room
    num_cached  tokens of a waiting request that the prefix cache holds
    tenant_key  sort key of a request, before its arrival: aged, priority, tenant
    reach       position, up to the given one, for which a running prompt has pages in this step
    whole       a prompt is computed in one step; prompts run in order of arrival up to the first that does not fit
    """

    start: Callable[[Request], bool]
    num_cached: Callable[[Request], int]
    reach: Callable[[Request, int], int]
    tenant_key: Callable[[Request], TenantKey]
    whole: bool = False

    def divide(
        self, budget: int, running: Sequence[Request], waiting: Sequence[Request], step: int
    ) -> dict[Request, int]:
        """Return the number of tokens of each prompt in this step. Prompts with tokens left after it come last.

        running: in any order. waiting: in the order of the policy.
        """
        shares: dict[Request, int] = {}
        in_order = heapq.merge(sorted(running, key=self._order), waiting, key=self._order)
        # Alternate between rounding up and down, so that a budget of one token serves both halves.
        half = budget if self.whole else (budget + step % 2) // 2
        left = budget - self._serve(in_order, half, shares)
        if left and not self.whole:
            shortest = sorted((*running, *waiting), key=self._shortest_first)
            self._serve(shortest, left, shares)
        given = [(request, tokens) for request, tokens in shares.items() if tokens and _runs(request)]
        return dict(sorted(given, key=lambda share: self._rest(*share)))

    def _serve(self, prompts: Iterable[Request], budget: int, shares: dict[Request, int]) -> int:
        """Give each prompt what it can use until the budget is spent. Returns the number of tokens given."""
        left = budget
        for request in prompts:
            if left <= 0:
                break
            if not _runs(request):
                if self.whole and request.num_tokens > left:
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
        """Sort key: priority, what the tenant was served, fewest tokens left, arrival."""
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
