"""The order of prompts, and how many tokens of a step each gets."""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from jaxserve.scheduler.admission import PromptShares
from jaxserve.scheduler.tenants import TenantShares
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import Request, RequestStatus


def prompt(name: str, tokens: int, *, priority: int = 0, arrival: float = 0.0, aged: bool = False) -> Request:
    """A waiting request."""
    request = Request(name, [0] * tokens, SamplingParams(), arrival, seed=0, max_tokens=1, priority=priority)
    request.aged = aged
    return request


def running(name: str, tokens: int, *, computed: int = 0, **changes: object) -> Request:
    request = prompt(name, tokens, **changes)  # type: ignore[arg-type]
    request.status, request.num_prefill_tokens, request.num_computed_tokens = RequestStatus.RUNNING, tokens, computed
    return request


@dataclass
class Engine:
    """Starts all waiting requests but those without room."""

    no_room: Collection[str] = ()
    cached: dict[str, int] = field(default_factory=dict)
    reach: Callable[[Request, int], int] = lambda request, end: end
    whole: bool = False
    asked: list[str] = field(default_factory=list)

    def divide(self, budget: int, requests: list[Request], step: int = 2) -> dict[str, int]:
        shares = PromptShares(
            self.start,
            self.num_cached,
            self.reach,
            TenantShares(1, 1, 1).key_of,
            self.whole,
        )
        runs = [request for request in requests if request.status is RequestStatus.RUNNING]
        waits = [request for request in requests if request not in runs]
        return {request.request_id: tokens for request, tokens in shares.divide(budget, runs, waits, step).items()}

    def start(self, request: Request) -> bool:
        self.asked.append(request.request_id)
        if request.request_id in self.no_room:
            return False
        request.status, request.num_prefill_tokens = RequestStatus.RUNNING, request.num_tokens
        request.num_computed_tokens = self.num_cached(request)
        return True

    def num_cached(self, request: Request) -> int:
        return self.cached.get(request.request_id, 0)


LONG = 1000


@pytest.mark.parametrize(
    ("requests", "shares"),
    [
        # one prompt gets everything
        ([running("a", LONG)], {"a": 100}),
        ([prompt("a", 30)], {"a": 30}),
        # prompts that all fit
        ([running("a", 20), prompt("b", 30), prompt("c", 40)], {"a": 20, "b": 30, "c": 40}),
        # a short request behind long ones, waiting or running
        ([running("a", LONG), prompt("short", 10, arrival=1)], {"short": 10, "a": 90}),
        ([running("a", LONG), running("b", LONG, arrival=1), prompt("short", 10, arrival=2)], {"short": 10, "a": 90}),
        ([prompt(f"l{i}", LONG, arrival=i) for i in range(16)] + [prompt("s", 10, arrival=99)], {"s": 10, "l0": 90}),
        # the first to arrive goes on beside short requests that never end
        ([running("a", LONG)] + [prompt(f"s{i}", 25, arrival=1 + i) for i in range(9)], {"s0": 25, "s1": 25, "a": 50}),
        # a longer one that came earlier is not passed for ever
        ([prompt("a", LONG), running("b", 900, arrival=1), running("c", 800, arrival=2)], {"c": 50, "a": 50}),
        # the order is that of arrival, not of admission
        ([running("b", LONG, arrival=2), running("a", LONG, arrival=1)], {"a": 100}),
        # what is cached of a prompt counts as done
        ([running("a", LONG), prompt("b", LONG), prompt("cached", LONG, arrival=2)], {"cached": 20, "a": 80}),
        # better priorities first, in both halves
        ([running("a", LONG, priority=5), prompt("b", 300, arrival=1)], {"b": 100}),
        ([running("a", LONG, priority=5), prompt("b", 60, arrival=1)], {"b": 60, "a": 40}),
        ([running("a", LONG, priority=5), running("b", 10, priority=9), prompt("c", LONG, arrival=1)], {"c": 100}),
        # an aged one gets half, whatever comes
        ([running("a", LONG, priority=5, aged=True), prompt("b", LONG), prompt("c", 5)], {"c": 5, "a": 50, "b": 45}),
        ([prompt("a", LONG, priority=5, aged=True), prompt("b", LONG)], {"a": 50, "b": 50}),
    ],
)  # fmt: skip
def test_who_gets_how_many_of_100_tokens(requests: list[Request], shares: dict[str, int]) -> None:
    assert Engine(cached={"cached": 980}).divide(100, requests) == shares


def test_prompts_that_are_not_done_come_last() -> None:
    """The end of a step may be cut off, and no short prompt should wait for it."""
    requests = [running("long", LONG), prompt("a", 10, arrival=1), running("longer", 2 * LONG), prompt("b", 5)]
    assert list(Engine().divide(100, requests)) == ["b", "a", "long"]


def test_a_request_that_finds_no_room_is_asked_once() -> None:
    engine = Engine(no_room="b")
    assert engine.divide(100, [running("a", 60), prompt("b", 60), prompt("c", 30)]) == {"a": 60, "c": 30}
    assert engine.asked.count("b") == 1


def test_a_single_token_serves_both_halves_in_turn() -> None:
    requests = [running("long", LONG), running("short", 5, arrival=1)]
    assert [Engine().divide(1, requests, step) for step in range(4)] == [{"short": 1}, {"long": 1}] * 2


def test_pages_that_are_not_free_yet_leave_the_tokens_to_others() -> None:
    requests = [running("a", LONG, computed=40), running("b", LONG, arrival=1)]
    engine = Engine(reach=lambda request, end: min(end, 48) if request.request_id == "a" else end)
    assert engine.divide(100, requests) == {"a": 8, "b": 92}


def test_a_request_preempted_for_another_gets_nothing() -> None:
    victim, better = running("victim", LONG), prompt("better", 50)
    engine = Engine()

    def preempt(request: Request) -> bool:
        victim.status = RequestStatus.PREEMPTED
        return False

    engine.start = preempt  # type: ignore[method-assign]
    assert engine.divide(100, [victim, better]) == {}


@pytest.mark.parametrize(
    ("lengths", "shares"),
    [([60, 40, 30], [60, 40]), ([60, 50, 30], [60]), ([100, 1], [100]), ([30, 30, 30, 30], [30, 30, 30])],
)
def test_whole_prompts_are_taken_in_order_while_they_fit(lengths: list[int], shares: list[int]) -> None:
    requests = [prompt(f"{i}", length) for i, length in enumerate(lengths)]
    assert list(Engine(whole=True).divide(100, requests).values()) == shares


def test_the_budget_is_used_up_and_no_prompt_gets_more_than_it_needs() -> None:
    rng = random.Random(0)
    for step in range(500):
        requests = [
            rng.choice([prompt, running])(
                f"r{i}", rng.randrange(1, 200), priority=rng.randrange(3), arrival=i, aged=rng.random() < 0.1
            )
            for i in range(rng.randrange(12))
        ]
        lengths = {request.request_id: request.num_tokens for request in requests}
        budget = rng.randrange(1, 400)
        shares = Engine().divide(budget, sorted(requests, key=lambda each: (not each.aged, each.priority)), step)
        assert sum(shares.values()) == min(budget, sum(lengths.values()))
        assert all(0 < tokens <= lengths[name] for name, tokens in shares.items())


@pytest.mark.parametrize("length", [500, 5000])
def test_a_long_prompt_is_at_most_twice_as_slow_beside_any_short_ones(length: int) -> None:
    long, engine, steps = running("long", length), Engine(), 0
    while long.num_computed_tokens < length:
        steps += 1
        shorts = [prompt(f"s{steps}.{i}", 40, arrival=steps) for i in range(10)]
        long.num_computed_tokens += engine.divide(100, [long, *shorts], steps)["long"]
    assert steps <= 2 * length / 100 + 1
