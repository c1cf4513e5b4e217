"""The estimates behind admission, by hand."""

import gc
from typing import Any, NoReturn

import pytest

from jaxserve.kv.radix_cache import Node
from jaxserve.scheduler.admission import CLIP_NEW_TOKENS, DECAY_STEPS, MAX_STALL, NewTokenRatio, PrefillsInProgress
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import Request
from tests.fakes import make_core, make_request, small_config

PAGE = 4
ROOT = Node("", -1, None)


def request(
    prompt: list[int],
    *,
    output: int = 0,
    max_tokens: int = 100,
    stops: bool = True,
    node: Node = ROOT,
    group: str = "",
) -> Request:
    result = Request("r", prompt, SamplingParams(), arrival=0.0, seed=0, max_tokens=max_tokens, group=group)
    result.cache_node = node
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


def prefills(*leaders: Request) -> PrefillsInProgress:
    """They have their pages up to `cache_node` in the cache."""
    result = PrefillsInProgress(PAGE, prefix_cache=True)
    for leader in leaders:
        result.add(leader, step=1)
    return result


def worth(progress: PrefillsInProgress, follower: Request, node: Node = ROOT, step: int = 2) -> bool:
    return progress.worth_waiting(follower, node, step)


def test_a_sibling_waits() -> None:
    for length in (9, 12, 15, 16, 17, 200):
        prompt = list(range(length))
        assert worth(prefills(request(prompt)), request(prompt))


def test_nothing_can_be_shared_below_a_page_and_a_token() -> None:
    assert not worth(prefills(request([1, 2, 3])), request([1, 2, 3]))
    assert not worth(prefills(request([1, 2, 3, 4])), request([1, 2, 3, 4]))


def test_nobody_waits_for_what_is_cached_already() -> None:
    node = Node((0, 1, 2, 3), 0, ROOT)
    leader = request(list(range(8)), node=node)
    assert not worth(prefills(leader), request(list(range(8))), node), "its last token is its own to compute"


def test_nobody_waits_for_less_than_half_of_what_it_has_to_compute() -> None:
    leader = request(list(range(100)))
    assert worth(prefills(leader), request([*range(8), 99, 99])), "8 of 10, and not for the other 92"
    assert worth(prefills(leader), request([*range(8), *[99] * 8]))
    assert not worth(prefills(leader), request([*range(8), *[99] * 9]))


def test_what_counts_begins_after_the_cached_prefix() -> None:
    node = Node((0, 1, 2, 3), 0, ROOT)
    prompt = list(range(12))
    progress = prefills(request(prompt, node=node))
    assert not worth(progress, request(prompt))
    assert worth(progress, request(prompt), node)
    assert not worth(progress, request([*range(4), *[50] * 8]), node)


def test_a_prefill_is_found_by_what_it_has_in_the_cache_now() -> None:
    leader, node = request(list(range(12))), Node((0, 1, 2, 3), 0, ROOT)
    progress = prefills(leader)
    leader.cache_node = node
    progress.advance(leader)
    assert worth(progress, request(list(range(12))), node)
    assert not worth(progress, request(list(range(12))))
    progress.remove(leader)
    progress.advance(leader)
    assert not worth(progress, request(list(range(12))), node)


def test_a_prefill_that_stands_still_is_not_waited_for() -> None:
    leader, follower = request(list(range(100))), request(list(range(100)))
    progress = prefills(leader)
    assert worth(progress, follower, step=1 + MAX_STALL) and not worth(progress, follower, step=2 + MAX_STALL)
    leader.last_step = 5
    assert worth(progress, follower, step=5 + MAX_STALL)


def test_nobody_waits_for_a_worse_request() -> None:
    leader, follower = request(list(range(12))), request(list(range(12)))
    leader.priority = 1
    assert not worth(prefills(leader), follower)


def test_nobody_waits_for_a_prefill_that_is_over_or_for_prompt_logprobs() -> None:
    leader, prompt = request(list(range(12))), list(range(12))
    progress = prefills(leader)
    follower = request(prompt)
    follower.prompt_logprobs = []
    assert not worth(progress, follower)
    progress.remove(leader)
    progress.remove(leader)
    assert not worth(progress, request(prompt))


def test_the_end_of_a_former_leader_leaves_the_new_one() -> None:
    first, second, prompt = request(list(range(12))), request(list(range(12))), list(range(12))
    progress = prefills(first, second)
    progress.remove(first)
    assert worth(progress, request(prompt))
    progress.add(first, step=3)
    progress.remove(first)
    progress.remove(second)
    assert not worth(progress, request(prompt))


def test_without_a_prefix_cache_there_is_nothing_to_wait_for() -> None:
    progress = PrefillsInProgress(PAGE, prefix_cache=False)
    progress.add(request(list(range(12)), group="g"), step=1)
    assert not worth(progress, request(list(range(12))))
    assert not progress.awaits_prefill(request(list(range(12)), group="g"), 2)


# --- siblings


def siblings(count: int, prompt: list[int]) -> list[Request]:
    return [request(prompt, group="g") for _ in range(count)]


def test_a_sibling_is_found_by_its_group_and_not_by_its_tokens() -> None:
    class Unread(list[int]):
        def __getitem__(self, key: object) -> NoReturn:
            raise AssertionError("the prompt is read")

    prompt = Unread(range(100))
    first, second = siblings(2, prompt)
    progress = PrefillsInProgress(PAGE, prefix_cache=True)
    progress._siblings["g"], progress._started[first] = first, 1
    assert progress.awaits_prefill(second, 2)
    assert second.cache_node is first.cache_node


def test_a_sibling_starts_when_all_that_it_can_share_is_cached() -> None:
    prompt = list(range(13))
    first, second = siblings(2, prompt)
    progress = prefills(first)
    for page, waits in ((1, True), (2, True), (3, False)):
        first.cache_node = Node((), page, first.cache_node)
        progress.advance(first)
        assert progress.awaits_prefill(second, 2) == waits
        assert second.cache_node.depth == page, "the hint for its match"
    progress.remove(first)
    assert not progress.awaits_prefill(second, 2)


def test_other_prompts_of_the_same_group_are_no_siblings() -> None:
    progress = prefills(request(list(range(12)), group="g"))
    other = request(list(range(12)), group="g")
    assert not progress.awaits_prefill(other, 2) and other.cache_node is ROOT
    assert worth(progress, other), "equal tokens are found all the same"


def test_two_prompts_are_compared_once() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(key)

    progress, follower = prefills(request(list(range(400)))), request(Counted(range(400)))
    assert worth(progress, follower)
    Counted.reads = 0
    assert worth(progress, follower) and Counted.reads <= 2
    Counted.reads = 0
    assert progress.awaits_prefill(follower, 2) and not Counted.reads, "it need not be looked up"


def test_a_request_keeps_no_other_in_memory() -> None:
    """Equal prompts without an end: each waits for the one before it, and none holds what has ended."""
    core, number = make_core(small_config(num_pages=256, max_num_seqs=4, max_model_len=64)), 0
    for _ in range(60):
        while len(core.scheduler.live_ids) < 6:
            core.add(make_request(f"{number}", list(range(16)), max_tokens=2))
            number += 1
        core.step()
    gc.collect()
    requests = [each for each in gc.get_objects() if type(each) is Request and each.request_id.isdecimal()]
    assert number > 60 and len(requests) < 20
