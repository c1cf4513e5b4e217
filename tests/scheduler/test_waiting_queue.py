"""Who is tried next."""

import time
from collections.abc import Callable

import pytest

from jaxserve.scheduler.tenants import TenantShares
from jaxserve.scheduler.waiting_queue import WINDOW, WaitingQueue
from jaxserve.types.sampling import BACKGROUND_PRIORITY, SamplingParams, Tenant
from jaxserve.types.step import Request, RequestStatus
from tests.fakes import small_config


def request(name: str, *, priority: int = 0, queued_step: int = 0, matched: int = 0) -> Request:
    result = Request(name, [0] * 10, SamplingParams(), arrival=0.0, seed=0, max_tokens=1)
    result.priority, result.queued_step, result.num_cached_tokens = priority, queued_step, matched
    return result


def queue(policy: str, *requests: Request, aging_steps: int = 100) -> WaitingQueue:
    config = small_config(policy=policy, aging_steps=aging_steps)
    tenants = TenantShares(config.num_slots, config.num_pages, config.max_num_batched_tokens)
    result = WaitingQueue(config, lambda each: each.num_cached_tokens, tenants)
    for each in requests:
        each.priority = config.rank(each.priority)
        tenants.add(each)
        result.push(each)
    return result


def order(waiting: WaitingQueue, step: int = 0, *, batch: bool = True) -> str:
    waiting.age(step)
    return "".join(each.request_id for each in waiting.candidates(batch=batch))


def preempted(name: str, **changes: int) -> Request:
    result = request(name, **changes)
    result.status = RequestStatus.PREEMPTED
    return result


def test_fcfs_is_the_order_of_arrival_whatever_else() -> None:
    waiting = queue("fcfs", request("a"), request("b", matched=5), request("c"))
    assert order(waiting) == order(waiting, step=10_000) == "abc"


def test_preempted_requests_come_first() -> None:
    waiting = queue("fcfs", request("a"), request("b"))
    waiting.push_front(preempted("y"))
    waiting.push_front(preempted("x"))
    assert order(waiting) == "xyab"


def test_lower_priority_values_come_first_and_arrival_decides_between_equals() -> None:
    waiting = queue("priority", request("c", priority=5), request("a", priority=-1), request("d", priority=5))
    waiting.push_front(preempted("b", priority=5))
    assert order(waiting) == "abcd"


def test_lpm_takes_the_longest_match_first() -> None:
    waiting = queue("lpm", request("c"), request("b", matched=4), request("a", matched=8), request("d"))
    waiting.push_front(preempted("p"))
    assert order(waiting) == "pabcd"


def test_lpm_compares_a_window_only() -> None:
    crowd = [request(chr(1000 + i)) for i in range(WINDOW)]
    waiting = queue("lpm", *crowd, request("z", matched=99))
    assert order(waiting)[-1] == "z"


def test_one_that_has_waited_long_enough_is_passed_by_nobody() -> None:
    for policy in ("priority", "lpm"):
        late = request("c", priority=0, queued_step=50, matched=9)
        waiting = queue(policy, request("a", priority=9), request("b", priority=8, queued_step=1), late)
        assert order(waiting, step=99) in ("cba", "cab")
        assert order(waiting, step=100)[:2] == "ac"
        assert order(waiting, step=101) == "abc"
        assert [each.aged for each in waiting.candidates()] == [True, True, False]


def test_a_preempted_request_keeps_its_age() -> None:
    waiting = queue("priority", request("a", priority=1, queued_step=60))
    waiting.push_front(preempted("old", priority=7, queued_step=0))
    assert order(waiting, step=120) == "olda"


def test_a_younger_preempted_request_at_the_head_hides_no_older_one() -> None:
    waiting = queue("lpm", request("old", queued_step=0), request("new", queued_step=90, matched=3))
    waiting.push_front(preempted("p", queued_step=80))
    assert order(waiting, step=100) == "oldpnew"


def test_prompt_tokens_are_counted() -> None:
    first, second = request("a"), request("b", priority=3)
    waiting = queue("priority", first, second)
    assert (len(waiting), waiting.num_tokens) == (2, 20)
    waiting.remove(first)
    assert (len(waiting), waiting.num_tokens, order(waiting)) == (1, 10, "b")
    waiting.remove(second)
    assert (len(waiting), waiting.num_tokens, list(waiting)) == (0, 0, [])


# --- batch requests


def batch(name: str, queued_step: int = 0) -> Request:
    return request(name, priority=BACKGROUND_PRIORITY, queued_step=queued_step)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_batch_requests_age_under_every_policy_one_at_a_time(policy: str) -> None:
    waiting = queue(policy, batch("a"), batch("b"), request("x", queued_step=90))
    assert order(waiting, step=99) == "xab"
    assert order(waiting, step=100) == order(waiting, step=150) == "axb"
    (first, *_) = waiting.candidates()
    waiting.remove(first)
    first.status = RequestStatus.RUNNING
    assert order(waiting, step=160) == "xb", "the aged one still runs"
    first.status = RequestStatus.FINISHED
    assert order(waiting, step=161) == order(waiting, step=260) == "xb"
    assert order(waiting, step=261) == "bx"


def test_batch_requests_can_be_left_out_unless_they_are_aged() -> None:
    waiting = queue("fcfs", batch("a"), batch("b"), request("x"))
    assert order(waiting, batch=False) == "x"
    assert order(waiting, step=100, batch=False) == "ax"
    assert waiting.num_online == 1


def test_a_prompt_that_is_being_computed_ages_and_a_decoding_request_does_not() -> None:
    prefilling, decoding, ended = request("p"), request("d"), request("e")
    waiting = queue("priority", prefilling, decoding, ended)
    for each in (prefilling, decoding, ended):
        waiting.remove(each)
        each.status, each.num_prefill_tokens = RequestStatus.RUNNING, 10
    decoding.num_computed_tokens, ended.status = 10, RequestStatus.FINISHED
    waiting.age(100)
    assert [each.aged for each in (prefilling, decoding, ended)] == [True, False, False]
    decoding.status = RequestStatus.PREEMPTED
    waiting.push_front(decoding)
    assert order(waiting, step=101) == "d" and decoding.aged


def test_an_aged_request_can_leave_and_come_back() -> None:
    waiting = queue("priority", request("a"), request("b"), request("c", queued_step=50))
    assert order(waiting, step=100) == "abc"
    first = next(waiting.candidates())
    waiting.remove(first)
    assert (order(waiting), waiting.best_priority) == ("bc", 0)
    first.status = RequestStatus.PREEMPTED
    waiting.push_front(first)
    assert order(waiting) == "abc"


# --- cost


def seconds(work: Callable[[], object], times: int = 200) -> float:
    """CPU time of one call, the best of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(times):
            work()
        rounds.append(time.thread_time() - began)
    return min(rounds) / times


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_next_request_costs_the_same_however_many_wait(policy: str) -> None:
    def cost(count: int) -> float:
        waiting = queue(policy, *(request(f"r{i}", priority=i) for i in range(count)), aging_steps=10**9)
        return seconds(lambda: (waiting.age(1), len(waiting), waiting.best_priority, next(waiting.candidates())))

    assert cost(8192) < 4 * cost(64) + 1e-5


def test_what_has_started_or_ended_is_forgotten() -> None:
    """Entries for aging are dropped although none of them is ever due."""
    waiting = queue("priority", aging_steps=10**9)
    for i in range(20_000):
        one = request(f"r{i}")
        waiting.push(one)
        waiting.remove(one)
        one.status = RequestStatus.FINISHED
    assert len(waiting._aging._online._heap) <= 1025


def test_the_oldest_ages_first_after_others_were_forgotten() -> None:
    waiting = queue("priority", aging_steps=100)
    requests = [request(str(step), queued_step=step) for step in reversed(range(1024))]
    for one in requests:
        waiting.push(one)
    for one in requests[-20:]:
        waiting.remove(one)
        one.status = RequestStatus.FINISHED
    waiting.push(request("last", queued_step=1024))
    waiting.age(120)
    assert [one.request_id for one in requests if one.aged] == ["20"]


def test_a_tenant_of_twice_the_weight_starts_two_requests_for_one() -> None:
    requests = [request(name) for name in "abABCD"]
    for one in requests:
        one.tenant = Tenant("heavy", weight=2.0) if one.request_id.isupper() else Tenant("light")
    assert order(queue("fcfs", *requests)) == "aABbCD"
