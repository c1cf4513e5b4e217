"""Prefixes that are not evicted for a time, and pages that another engine computed."""

from __future__ import annotations

import pytest

from jaxserve.kv.held_pages import HeldPages
from jaxserve.kv.kv_manager import KVManager
from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node, RadixCache
from tests.fakes import small_config

PAGE = 2


def cached(*sequences: list[int]) -> tuple[RadixCache, list[Node]]:
    pool = PagePool(8)
    cache, nodes = RadixCache(pool, PAGE), []
    for tokens in sequences:
        root = cache.match_prefix("", tokens, 0)
        cache.lock(root)
        node, _ = cache.insert(root, tokens, pool.allocate(len(tokens) // PAGE), len(tokens) // PAGE)
        cache.unlock(node)
        nodes.append(node)
    return cache, nodes


def test_held_pages_are_evicted_when_their_time_is_over() -> None:
    cache, (first, second) = cached([1, 2, 3, 4], [5, 6])
    held = HeldPages(cache)
    held.hold(first, 10.0)
    held.expire(100.0)  # the time begins
    held.hold(second, 1.0)
    assert cache.evict(8) == 0 and cache.num_evictable == 0
    held.expire(109.0)
    held.expire(109.9)
    assert cache.evict(8) == 0
    cache.check_integrity(held.nodes)
    held.expire(110.0)
    assert cache.evict(8) == 3 and held.nodes == []


def test_all_holds_of_a_prefix_are_given_up_at_once() -> None:
    cache, (first, second, third) = cached([1, 2, 3, 4], [5, 6], [7, 8])
    held = HeldPages(cache)
    held.hold(first, 10.0)
    held.expire(0.0)
    held.hold(first, 10.0)
    held.hold(second, 10.0)
    held.give_up(third)
    held.give_up(first)
    held.give_up(first)
    assert held.nodes == [second] and cache.evict(8) == 3
    cache.check_integrity(held.nodes)


def test_the_oldest_hold_makes_room() -> None:
    cache, nodes = cached([1, 2], [3, 4], [5, 6])
    held = HeldPages(cache, max_prefixes=2)
    for node in nodes:
        held.hold(node, 1000.0)
        held.expire(0.0)
    assert held.nodes == nodes[1:] and cache.evict(8) == 1


@pytest.mark.parametrize("flush", [False, True])
def test_pages_of_another_engine_are_adopted(flush: bool) -> None:
    config = small_config(num_pages=6)
    kv, size = KVManager(config), config.page_size
    tokens = list(range(1, 4 * size + 2))
    first, pages = kv.adopt("", tokens)
    assert first == 0 and len(pages) == len(set(pages)) == 4
    longer = tokens[: 4 * size] + [7] * (4 * size)
    if flush:
        kv.flush()
    first, pages = kv.adopt("", longer)
    assert (first, len(pages)) == ((0, 6) if flush else (4, 2)), "as far as there is room"
    assert kv.cache.match_prefix("", longer, 8).depth == 6 and kv.cache.match_prefix("other", longer, 8).depth == 0
    kv.check_integrity([])
