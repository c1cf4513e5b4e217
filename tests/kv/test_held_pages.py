"""Prefixes that are not evicted for a time, and pages that another engine computed."""

from __future__ import annotations

import pytest

from jaxserve.kv.kv_manager import HeldPages, KVManager
from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node, RadixCache
from tests.fakes import make_core, make_request, run_all, small_config

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


@pytest.mark.parametrize("how", ["flush", "recover"])
def test_pages_that_nobody_can_fetch_any_more_are_not_held(how: str) -> None:
    """As after an update of the weights: a request that needs all pages does not wait for the end of a hold."""
    core = make_core(small_config(num_pages=8, max_model_len=32))
    run_all(core, [make_request("held", range(17), max_tokens=1, hold_seconds=3600.0)])
    kv = core.scheduler.kv
    assert kv.held.nodes and kv.num_available < 8
    core.flush_prefix_cache() if how == "flush" else core.recover()
    found = run_all(core, [make_request("all", range(30), max_tokens=2)], max_steps=50)
    assert len(found["all"].token_ids) == 2


def test_a_request_that_asks_for_no_hold_gets_none() -> None:
    core = make_core(small_config())
    run_all(core, [make_request("not held", range(17), max_tokens=1)])
    assert core.scheduler.kv.held.nodes == []


def test_integrity_sees_a_page_without_an_owner() -> None:
    kv = KVManager(small_config())
    kv.allocate(1)
    with pytest.raises(AssertionError, match="page"):
        kv.check_integrity([])


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
