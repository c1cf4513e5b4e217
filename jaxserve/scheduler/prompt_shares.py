"""How the prompt tokens of one step are divided among prompts. Knows no pages and no device.

Half of the tokens go to prompts in their order: aged prompts first, then by priority, then by arrival. The other half
goes to the prompts of the best priority that have the fewest tokens left, so a short prompt does not wait for a long
one. Tokens that one half does not need go to the other half, so the whole budget is used while any prompt can use it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxserve.types.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class PromptShares:
    """Divides a budget among running prompts and waiting requests, and starts the waiting ones it gives tokens to.

    start       gives a waiting request its slot and its pages; whether there was room
    num_cached  tokens of a waiting request that the prefix cache holds
    reach       position up to the given one that a running prompt has pages for in this step
    whole       a prompt is computed in one step: in the order of arrival, up to the first that does not fit
    """

    start: Callable[[Request], bool]
    num_cached: Callable[[Request], int]
    reach: Callable[[Request, int], int]
    whole: bool = False

    def divide(
        self, budget: int, running: Sequence[Request], waiting: Sequence[Request], step: int
    ) -> dict[Request, int]:
        """Tokens of each prompt in the step of this number. Prompts with tokens left after it come last.

        running: in any order. waiting: in the order of the policy.
        """
        shares: dict[Request, int] = {}
        in_order = heapq.merge(sorted(running, key=_order), waiting, key=_order)
        # Rounded up and down in turn, so that a budget of one token serves both halves.
        half = budget if self.whole else (budget + step % 2) // 2
        left = budget - self._serve(in_order, half, shares)
        if left and not self.whole:
            shortest = sorted((*running, *waiting), key=self._num_left)
            self._serve(shortest, left, shares)
        given = [(request, tokens) for request, tokens in shares.items() if tokens and _runs(request)]
        return dict(sorted(given, key=lambda share: self._rest(*share)))

    def _serve(self, prompts: Iterable[Request], budget: int, shares: dict[Request, int]) -> int:
        """Give each prompt what it can use until the budget is spent; the tokens given."""
        left = budget
        for request in prompts:
            if left <= 0:
                break
            if not _runs(request):
                if self.whole and request.num_tokens > left:
                    break
                if request in shares or not self.start(request):
                    shares[request] = 0  # tried once a step
                    continue
            given = shares.get(request, 0)
            start = request.num_computed_tokens + given
            tokens = self.reach(request, min(start + left, request.num_prefill_tokens)) - start
            shares[request] = given + tokens
            left -= tokens
        return budget - left

    def _num_left(self, request: Request) -> tuple[int, int, float]:
        """Sorts by priority, and then the shortest first."""
        if _runs(request):
            left = request.num_prefill_tokens - request.num_computed_tokens
        else:
            left = request.num_tokens - self.num_cached(request)
        return request.priority, left, request.arrival

    def _rest(self, request: Request, tokens: int) -> int:
        return request.num_prefill_tokens - request.num_computed_tokens - tokens


def _runs(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING


def _order(request: Request) -> tuple[bool, int, float]:
    return not request.aged, request.priority, request.arrival
