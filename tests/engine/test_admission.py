"""The estimates behind admission, by hand."""

import pytest

from jaxserve.engine.admission import CLIP_NEW_TOKENS, DECAY_STEPS, NewTokenRatio, PrefillsInProgress
from jaxserve.engine.radix_cache import Node
from jaxserve.engine.request import Request, SamplingParams

PAGE = 4
ROOT = Node("", -1, None)


def request(prompt: list[int], *, output: int = 0, max_tokens: int = 100, stops: bool = True) -> Request:
    result = Request("r", prompt, SamplingParams(), arrival=0.0, seed=0, max_tokens=max_tokens)
    result.output_token_ids = [0] * output
    result.stop_token_ids = frozenset({1} if stops else ())
    result.num_prefill_tokens = result.num_tokens
    return result


def test_the_ratio_falls_to_its_floor_and_returns_when_idle() -> None:
    ratio = NewTokenRatio(0.7)
    ratio.decay()
    assert ratio.value == pytest.approx(0.7 - (0.7 - 0.098) / DECAY_STEPS)
    for _ in range(2 * DECAY_STEPS):
        ratio.decay()
    assert ratio.value == pytest.approx(0.098)
    ratio.reset()
    assert ratio.value == 0.7


def test_a_retraction_raises_the_ratio_to_what_was_seen_and_never_lowers_it() -> None:
    ratio = NewTokenRatio(0.2)
    kept = [request([0], output=60), request([0], output=80)]
    ratio.rise(kept)
    assert ratio.value == pytest.approx((60 + 20 + 80 + 20) / 201)
    ratio.rise([request([0], max_tokens=1000)])
    assert ratio.value == pytest.approx(180 / 201)
    ratio.rise([request([0], output=99, max_tokens=100)])
    assert ratio.value == 1.0


def test_reserve_counts_what_is_left_times_the_ratio() -> None:
    ratio = NewTokenRatio(0.5)
    assert ratio.reserve([request([0], output=10), request([0], output=89)]) == 51  # ceil(0.5 * (90 + 11))
    assert ratio.reserve([request([0], max_tokens=10**6)]) == CLIP_NEW_TOKENS / 2
    assert ratio.reserve([request([0], max_tokens=10**6, stops=False)]) == 10**6, "nothing will stop it earlier"


def prefills(leader: Request, node: Node = ROOT) -> PrefillsInProgress:
    result = PrefillsInProgress(PAGE, prefix_cache=True)
    result.add(leader, node)
    return result


def test_a_sibling_waits() -> None:
    for length in (9, 12, 15, 16, 17, 200):
        prompt = list(range(length))
        assert prefills(request(prompt)).worth_waiting(request(prompt), ROOT)


def test_nothing_can_be_shared_below_a_page_and_a_token() -> None:
    assert not prefills(request([1, 2, 3])).worth_waiting(request([1, 2, 3]), ROOT)
    assert not prefills(request([1, 2, 3, 4])).worth_waiting(request([1, 2, 3, 4]), ROOT)


def test_nobody_waits_for_what_is_cached_already() -> None:
    node = Node((0, 1, 2, 3), 0, ROOT)
    leader = request(list(range(8)))
    leader.num_computed_tokens = 8
    follower = request(list(range(8)))
    assert not prefills(leader, node).worth_waiting(follower, node), "its last token is its own to compute"


def test_a_short_request_does_not_wait_behind_a_long_one() -> None:
    long, short = list(range(100)), [*range(8), 99, 99]
    leader = request(long)
    assert not prefills(leader).worth_waiting(request(short), ROOT), "8 shared tokens against 100 to compute first"
    leader.num_computed_tokens = 84
    assert prefills(leader).worth_waiting(request(short), ROOT), "8 against 16"


def test_what_counts_begins_after_the_cached_prefix() -> None:
    node = Node((0, 1, 2, 3), 0, ROOT)
    prompt = list(range(12))
    leader = request(prompt)
    leader.num_computed_tokens = 4
    progress = prefills(leader, node)
    assert not progress.worth_waiting(request(prompt), ROOT)
    assert progress.worth_waiting(request(prompt), node)
    assert not progress.worth_waiting(request([*range(4), *[50] * 8]), node)


def test_nobody_waits_for_a_prefill_that_is_over_or_for_prompt_logprobs() -> None:
    leader, prompt = request(list(range(12))), list(range(12))
    progress = prefills(leader)
    follower = request(prompt)
    follower.prompt_logprobs = []
    assert not progress.worth_waiting(follower, ROOT)
    progress.remove(leader)
    progress.remove(leader)
    assert not progress.worth_waiting(request(prompt), ROOT)


def test_the_end_of_a_former_leader_leaves_the_new_one() -> None:
    first, second, prompt = request(list(range(12))), request(list(range(12))), list(range(12))
    progress = prefills(first)
    progress.add(second, ROOT)
    progress.remove(first)
    assert progress.worth_waiting(request(prompt), ROOT)
    progress.add(first, ROOT)
    progress.remove(first)
    progress.remove(second)
    assert not progress.worth_waiting(request(prompt), ROOT)


def test_without_a_prefix_cache_there_is_nothing_to_wait_for() -> None:
    progress = PrefillsInProgress(PAGE, prefix_cache=False)
    progress.add(request(list(range(12))), ROOT)
    assert not progress.worth_waiting(request(list(range(12))), ROOT)
