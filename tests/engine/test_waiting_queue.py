"""Who is tried next."""

from jaxserve.engine.request import Request, RequestStatus, SamplingParams
from jaxserve.engine.waiting_queue import WINDOW, WaitingQueue


def request(name: str, *, priority: int = 0, queued_step: int = 0, matched: int = 0) -> Request:
    result = Request(name, [0] * 10, SamplingParams(), arrival=0.0, seed=0, max_tokens=1)
    result.priority, result.queued_step, result.num_cached_tokens = priority, queued_step, matched
    return result


def queue(policy: str, *requests: Request, aging_steps: int = 100) -> WaitingQueue:
    result = WaitingQueue(policy, aging_steps, lambda each: each.num_cached_tokens)
    for each in requests:
        result.push(each)
    return result


def order(waiting: WaitingQueue, step: int = 0) -> str:
    return "".join(each.request_id for each in waiting.candidates(step))


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
        waiting = queue(policy, request("a", priority=9), request("b", priority=8, queued_step=1))
        waiting.push(request("c", priority=0, queued_step=50, matched=9))
        assert order(waiting, step=99) in ("cba", "cab")
        assert order(waiting, step=100)[:2] == "ac"
        assert order(waiting, step=101) == "abc"
        assert [each.aged for each in waiting.candidates(101)] == [True, True, False]


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
