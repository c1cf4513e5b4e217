"""Pages with pictures: equal token ids never find the pages of another picture, wherever pages are looked up."""

from __future__ import annotations

import hashlib
from array import array

import pytest

from jaxserve.client.replicas import prompt_bytes
from jaxserve.kv.host_tier import HostTier
from jaxserve.kv.kv_manager import PageLog
from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import RadixCache
from jaxserve.scheduler.admission import PrefillsInProgress
from jaxserve.types.page_keys import page_keys, token_bytes, with_pictures
from jaxserve.types.picture import Picture
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.step import Request

PAGE = 4
PAD = 9
PROMPT = [1, 2, 3, *[PAD] * 6, 4, *[PAD] * 6, 5, 6, 7, 8]  # two pictures of six tokens in five pages


def picture(content: str, start: int, num_tokens: int = 6) -> Picture:
    return Picture(hashlib.sha256(content.encode()).digest(), b"", (1, 2, 12), start, num_tokens)


def keys(first: str, second: str) -> list[int]:
    return with_pictures(PROMPT, (picture(first, 3), picture(second, 10)), PAGE)


SAME = keys("a", "b")
# what is asked for -> how many of the five pages of SAME it may find
OTHERS = {
    "the same": (keys("a", "b"), 5),
    "another first picture": (keys("x", "b"), 0),
    "another second picture": (keys("a", "x"), 2),
    "the two swapped": (keys("b", "a"), 0),
    "the first by other settings": (keys("a by other settings", "b"), 0),
    "no pictures": (PROMPT, 0),
    "one token later": (with_pictures([0, *PROMPT[:-1]], (picture("a", 4), picture("b", 11)), PAGE), 0),
}
cases = pytest.mark.parametrize(("asked", "count"), OTHERS.values(), ids=OTHERS)


def cached(tokens: list[int], **hooks) -> tuple[RadixCache, PagePool]:
    pool = PagePool(16)
    cache = RadixCache(pool, PAGE, **hooks)
    root = cache.match_prefix("", tokens, 0)
    cache.lock(root)
    node, _ = cache.insert(root, tokens, pool.allocate(5), 5)
    cache.unlock(node)
    return cache, pool


@cases
def test_the_tree(asked: list[int], count: int):
    cache, _ = cached(SAME)
    assert cache.match_prefix("", asked, 5).depth == count
    assert cache.match_prefix("another tenant", asked, 5).depth == 0
    cache, _ = cached(asked)  # also as a handover adopts pages, which knows tokens only
    assert cache.match_prefix("", SAME, 5).depth == count


@cases
def test_the_host_tier_and_its_file(asked: list[int], count: int):
    tier = HostTier(8, PAGE)
    cache, _ = cached(SAME, on_evicted=tier.store)
    cache.evict(5)
    assert len(tier.find(cache.match_prefix("", asked, 0), asked, 5)) == count


@cases
def test_the_pages_that_the_router_is_told_of(asked: list[int], count: int):
    log = PageLog()
    cached(SAME, on_added=log.added)
    told = log.take()
    assert told is not None
    mine, size = [], 8
    other = PageLog()
    cached(asked, on_added=other.added)
    theirs = other.take()
    assert theirs is not None
    mine = [told.added[i : i + size] for i in range(0, len(told.added), size)]
    assert [theirs.added[i : i + size] in mine for i in range(0, len(theirs.added), size)] == [
        index < count for index in range(5)
    ]


def test_the_router_asks_for_the_pages_before_the_first_picture_only():
    request = EngineRequest(
        request_id="a", prompt_token_ids=PROMPT, params=SamplingParams(), pictures=(picture("a", 3), picture("b", 10))
    )
    assert prompt_bytes(request) == array("i", PROMPT[:3]).tobytes()
    assert not list(page_keys("", prompt_bytes(request), PAGE))


@cases
def test_prompts_that_wait_for_each_other(asked: list[int], count: int):
    def request(name: str, tokens: list[int]) -> Request:
        return Request(name, PROMPT, SamplingParams(), 0.0, 0, 4, picture_keys=tokens)

    prefills, leader, follower = PrefillsInProgress(PAGE, True), request("leader", SAME), request("follower", asked)
    root = RadixCache(PagePool(4), PAGE).match_prefix("", [], 0)
    leader.cache_node = root
    prefills.add(leader, 1)
    assert prefills.worth_waiting(follower, root, 1) == (count == 5)


def test_tokens_of_a_request_with_output():
    request = Request("a", PROMPT, SamplingParams(), 0.0, 0, 4, picture_keys=SAME, output_token_ids=[11, 12])
    whole = [*SAME, 11, 12]
    for start in range(len(whole)):
        for end in range(start, len(whole) + 1):
            assert request.page_tokens(start, end) == whole[start:end]


def test_pages_of_different_tokens_have_different_bytes():
    wide = -1 - (2**255 << 32 | 7)
    pages = [[1, 2], [1, wide], [wide, 1], [wide, wide], [wide - 1, wide], [1, 2, 0]]
    assert len({token_bytes(page) for page in pages}) == len(pages)
    assert token_bytes([1, 2]) == array("i", [1, 2]).tobytes()
