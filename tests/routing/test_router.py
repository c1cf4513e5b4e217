"""The router's rule and its index, by cases small enough to compute by hand. A page has 2 tokens."""

import random

import numpy as np
import pytest

from jaxserve.routing.router import PrefixIndex, ReplicaLoad, Router
from jaxserve.types.page_keys import PageEvents, page_keys

PAGE = 2


def prompt(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def keys(*tokens: int, namespace: str = "") -> bytes:
    return b"".join(page_keys(namespace, prompt(*tokens), PAGE))


def router(**cached: tuple[int, ...]) -> Router:
    """r0=(1, 2, 3, 4): replica 0 has the two pages of this prompt."""
    made = Router(PAGE)
    for name, tokens in cached.items():
        made.update(int(name[1:]), PageEvents(keys(*tokens)))
    return made


def loads(*live: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(replica, count) for replica, count in enumerate(live)]


def test_without_any_prefix_the_least_loaded_is_chosen() -> None:
    assert router().choose(loads(3, 2, 2), prompt(1, 2, 3)) == 1
    full = [ReplicaLoad(0, 2, pages_used=0.9), ReplicaLoad(1, 2, pages_used=0.1)]
    assert router().choose(full, prompt(1, 2, 3)) == 1


def test_more_than_half_of_the_prompt_beats_a_little_load() -> None:
    made = router(r0=(1, 2, 3, 4))
    assert made.choose(loads(8, 0), prompt(1, 2, 3, 4, 5, 6)) == 0
    assert made.choose(loads(8, 0), prompt(1, 2, 3, 4, 5, 6, 7)) == 0
    assert made.choose(loads(8, 0), prompt(1, 2, 3, 4, 5, 6, 7, 8)) == 1  # half is not more than half
    assert made.reasons == {"prefix": 2, "mixed": 1}


def test_a_spread_of_more_than_8_and_half_as_much_again_goes_to_the_least_loaded() -> None:
    made, ask = router(r0=(1, 2, 3, 4)), prompt(1, 2, 3, 4)
    assert made.choose(loads(8, 0), ask) == 0
    assert made.choose(loads(9, 0), ask) == 1
    assert made.choose(loads(27, 18), ask) == 0  # 1.5 times is not more than 1.5 times
    assert made.choose(loads(28, 18), ask) == 1


def test_below_half_a_matched_page_counts_as_one_request_less() -> None:
    made, ask = router(r0=(1, 2, 3, 4)), prompt(*range(1, 9))
    assert made.choose(loads(1, 0), ask) == 0
    assert made.choose(loads(2, 1), ask) == 0
    assert made.choose(loads(2, 0), ask) == 1  # 2 - 2 pages against 0: equal, so the less loaded one


def test_a_line_of_a_batch_goes_to_the_least_loaded() -> None:
    assert router(r0=(1, 2)).choose(loads(1, 0), prompt(1, 2), batch=True) == 1


def test_only_replicas_that_may_get_it_are_chosen() -> None:
    made = router(r0=(1, 2, 3, 4), r1=(1, 2))
    assert made.choose(loads(0, 5, 0)[1:], prompt(1, 2, 3)) == 1
    assert made.choose(loads(0, 5)[1:], prompt(7)) == 1


def test_a_prefix_is_of_its_namespace() -> None:
    made = Router(PAGE)
    made.update(0, PageEvents(keys(1, 2, 3, 4, namespace="a")))
    assert made.choose(loads(1, 0), prompt(1, 2, 3, 4), "a") == 0
    assert made.choose(loads(1, 0), prompt(1, 2, 3, 4), "b") == 1


def test_what_an_engine_evicts_and_what_a_dead_one_had_is_forgotten() -> None:
    made, ask = router(r0=(1, 2, 3, 4), r1=(1, 2, 3, 4)), prompt(1, 2, 3, 4)
    made.update(0, PageEvents(removed=keys(1, 2, 3, 4)))
    assert made.index.match("", ask, [0, 1]) == {0: 0, 1: 2}
    made.forget(1)
    assert made.index.match("", ask, [0, 1]) == {0: 0, 1: 0} and not len(made.index)


def test_a_match_ends_at_the_first_gap() -> None:
    index = PrefixIndex(PAGE)
    first, second, third = page_keys("", prompt(1, 2, 3, 4, 5, 6), PAGE)
    index.update(0, PageEvents(first + third))
    index.update(1, PageEvents(first + second))
    assert index.match("", prompt(1, 2, 3, 4, 5, 6), [0, 1, 2]) == {0: 1, 1: 2, 2: 0}


@pytest.mark.parametrize("seed", range(5))
def test_the_index_says_what_sets_of_prefixes_say(seed: int) -> None:
    """Random caches of four replicas, against the set of prefixes of each."""
    rng = random.Random(seed)
    index, caches = PrefixIndex(PAGE), [set[tuple[int, ...]]() for _ in range(4)]
    for _ in range(400):
        replica, tokens = rng.randrange(4), tuple(rng.choices(range(3), k=2 * rng.randint(1, 4)))
        last = [*page_keys("", prompt(*tokens), PAGE)][-1]
        cache = caches[replica]
        if tokens in cache and rng.random() < 0.7:
            cache.remove(tokens)
            index.update(replica, PageEvents(removed=last))
        elif tokens not in cache:
            cache.add(tokens)
            index.update(replica, PageEvents(last))
        if rng.random() < 0.02:
            cache.clear()
            index.forget(replica)
        ask = rng.choices(range(3), k=9)
        expected = {}
        for number, own in enumerate(caches):
            pages = 0
            while pages < 4 and tuple(ask[: 2 * pages + 2]) in own:
                pages += 1
            expected[number] = pages
        assert index.match("", prompt(*ask), range(4)) == expected
    assert len(index) == len(set().union(*caches))
