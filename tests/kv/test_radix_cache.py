"""The prefix cache against a dictionary that does the same without a tree."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node, RadixCache

PAGE = 2


class Cache:
    """A RadixCache with a pool, and the life of a request in three words."""

    def __init__(self, num_pages: int = 16) -> None:
        self.pool = PagePool(num_pages)
        self.radix = RadixCache(self.pool, PAGE)

    def match(self, tokens: list[int], namespace: str = "", hint: Node | None = None) -> Node:
        return self.radix.match_prefix(namespace, tokens, len(tokens) // PAGE, hint)

    def hold(self, tokens: list[int], namespace: str = "") -> Node:
        """Match, lock, compute and insert; duplicates are given back at once."""
        start = self.match(tokens, namespace)
        self.radix.lock(start)
        pages = self.pool.allocate(len(tokens) // PAGE - start.depth)
        node, duplicates = self.radix.insert(start, tokens[start.depth * PAGE :], pages, len(tokens) // PAGE)
        self.pool.free(duplicates)
        return node

    def put(self, tokens: list[int], namespace: str = "") -> None:
        self.radix.unlock(self.hold(tokens, namespace))

    def check(self, *held: Node) -> None:
        self.pool.check_integrity(self.radix.check_integrity(held))


def test_the_longest_cached_prefix_is_found() -> None:
    cache = Cache()
    cache.put([1, 2, 3, 4, 5, 6])
    assert cache.match([1, 2, 3, 4, 9, 9]).depth == 2
    assert cache.match([1, 2, 3, 4, 5, 6, 7]).depth == 3
    assert cache.match([2, 2]).depth == 0
    assert cache.match([1, 2, 3]).depth == 1, "half a page is no match"
    assert cache.match([1, 2, 3, 4]).page_ids == cache.match([1, 2, 3, 4, 5, 6]).page_ids[:2]
    cache.check()


def test_a_match_is_no_longer_than_asked() -> None:
    cache = Cache()
    cache.put([1, 2, 3, 4])
    node = cache.match([1, 2, 3, 4])
    assert cache.radix.match_prefix("", [1, 2, 3, 4], 1).depth == 1
    assert cache.radix.match_prefix("", [1, 2, 3, 4], 1, hint=node).depth == 1


def test_namespaces_share_nothing() -> None:
    cache = Cache()
    cache.put([1, 2], "salt")
    assert cache.match([1, 2]).depth == cache.match([1, 2], "other").depth == 0
    assert cache.match([1, 2], "salt").depth == 1
    cache.check()


def test_an_empty_namespace_is_forgotten() -> None:
    cache = Cache()
    for i in range(100):
        cache.put([1, 2], f"salt-{i}")
        cache.radix.evict(1)
    node = cache.match([], "unused")
    cache.radix.lock(node)
    cache.radix.unlock(node)
    assert cache.radix._roots == {}
    cache.check()


def test_a_root_held_across_the_end_of_its_namespace_stays_the_root() -> None:
    cache = Cache()
    root = cache.match([], "salt")
    cache.radix.lock(root)
    cache.put([1, 2], "salt")
    cache.radix.evict(1)
    node, _ = cache.radix.insert(root, [3, 4], cache.pool.allocate(1), 1)
    assert cache.match([3, 4], "salt") is node
    cache.check(node)


def test_locked_pages_are_not_evicted() -> None:
    cache = Cache()
    node = cache.hold([1, 2, 3, 4])
    cache.put([1, 2, 5, 6])
    assert cache.radix.num_evictable == 1
    assert cache.radix.evict(5) == 1
    assert cache.match([1, 2, 3, 4]).depth == 2 and cache.match([1, 2, 5, 6]).depth == 1
    cache.check(node)
    cache.radix.unlock(node)
    assert cache.radix.evict(5) == 2
    assert cache.pool.num_free == 16


def test_the_least_recently_used_goes_first_and_leaves_before_their_prefix() -> None:
    cache = Cache()
    for tokens in ([1, 1, 2, 2], [3, 3, 4, 4], [1, 1, 5, 5]):
        cache.put(tokens)
    assert cache.radix.evict(2) == 2
    assert cache.match([1, 1, 2, 2]).depth == 1, "the first leaf has gone, its shared prefix was used since"
    assert cache.match([3, 3, 4, 4]).depth == 1
    cache.radix.evict(1)
    assert cache.match([3, 3, 4, 4]).depth == 0
    cache.put([1, 1])  # used again: older than it was is [5, 5] above it
    cache.radix.evict(1)
    assert cache.match([1, 1, 5, 5]).depth == 1
    cache.check()


def test_use_makes_a_leaf_young_again() -> None:
    cache = Cache()
    for tokens in ([1, 1], [2, 2], [1, 1]):
        cache.put(tokens)
    cache.radix.evict(1)
    assert cache.match([1, 1]).depth == 1 and cache.match([2, 2]).depth == 0


def test_a_match_without_a_lock_is_no_use() -> None:
    cache = Cache()
    cache.put([1, 1])
    cache.put([2, 2])
    cache.match([1, 1])
    cache.radix.evict(1)
    assert cache.match([1, 1]).depth == 0 and cache.match([2, 2]).depth == 1


def test_pages_that_the_tree_has_already_stay_the_callers() -> None:
    cache = Cache()
    root = cache.match([])
    cache.radix.lock(root)
    first = cache.hold([1, 2, 3, 4])  # computed meanwhile by somebody else
    mine = cache.pool.allocate(3)
    node, duplicates = cache.radix.insert(root, [1, 2, 3, 4, 5, 6], mine, 3)
    assert duplicates == mine[:2] and node.page_id == mine[2] and node.parent is first
    cache.pool.free(duplicates)
    cache.check(first, node)


def test_a_copy_that_nobody_uses_makes_way() -> None:
    cache = Cache()
    root = cache.match([])
    cache.radix.lock(root)
    cache.put([1, 2, 3, 4])
    mine = cache.pool.allocate(2)
    node, duplicates = cache.radix.insert(root, [1, 2, 3, 4], mine, 2)
    assert (duplicates, node.page_ids) == ([], mine)
    cache.check(node)


def test_duplicates_are_merged_once_the_others_have_left() -> None:
    cache = Cache()
    root = cache.match([])
    cache.radix.lock(root)
    short, long = cache.hold([1, 2]), cache.hold([1, 2, 3, 4])
    mine = cache.pool.allocate(2)
    node, duplicates = cache.radix.insert(root, [1, 2, 3, 4], mine, 2)
    assert duplicates == mine and node is long
    cache.radix.unlock(long)
    assert cache.radix.merge_duplicates(node, mine, duplicates) == mine[:1], "the first page is still in use"
    cache.radix.unlock(short)
    assert cache.radix.merge_duplicates(node, mine, mine[:1]) == []
    assert node.page_ids == mine and cache.pool.num_free == 14
    cache.check(node)


def test_a_duplicate_behind_a_shared_page_stays_while_its_copy_is_in_use() -> None:
    cache = Cache()
    start = cache.hold([1, 2])
    other = cache.hold([1, 2, 3, 4])
    mine = [start.page_id, *cache.pool.allocate(1)]
    node, duplicates = cache.radix.insert(start, [3, 4], mine[1:], 2)
    assert cache.radix.merge_duplicates(node, mine, duplicates) == mine[1:] == duplicates
    cache.radix.unlock(other)
    assert cache.radix.merge_duplicates(node, mine, duplicates) == [] and node.page_ids == mine


def test_a_hint_only_saves_the_walk() -> None:
    cache = Cache()
    cache.put([1, 2, 3, 4])
    hint = cache.match([1, 2, 3, 4, 5, 6])
    cache.put([1, 2, 3, 4, 5, 6])
    assert cache.match([1, 2, 3, 4, 5, 6], hint=hint).depth == 3
    cache.radix.evict(2)
    assert cache.match([1, 2, 3, 4, 5, 6], hint=hint).depth == 1
    cache.radix.flush()
    assert cache.match([1, 2, 3, 4, 5, 6], hint=hint).depth == 0
    node = cache.match([1, 2], hint=hint)
    cache.radix.lock(node)
    assert cache.match([1, 2]) is node, "the hint's dead root must not come back"


def test_a_discarded_prefix_is_not_found_and_freed_by_its_last_user() -> None:
    cache = Cache()
    node = cache.hold([1, 2, 3, 4])
    cache.put([1, 2, 5, 6])
    cache.put([7, 8])
    cache.radix.discard(node)
    assert cache.match([1, 2]).depth == 0 and cache.match([7, 8]).depth == 1
    assert cache.radix.num_pages == 3, "the two in use, and the other prefix"
    cache.check(node)
    more = cache.pool.allocate(1)
    assert cache.radix.insert(node, [5, 6], more, 3) == (node, [])
    cache.pool.free(more)
    cache.radix.unlock(node)
    assert cache.radix.num_pages == 1
    cache.check()


def test_flush_forgets_everything_and_takes_nothing_from_before() -> None:
    cache = Cache()
    node, root = cache.hold([1, 2]), cache.match([], "other")
    cache.radix.lock(root)
    cache.put([3, 4])
    cache.radix.flush()
    assert cache.match([1, 2]).depth == 0 and cache.radix.num_pages == 1
    assert cache.radix.insert(root, [9, 9], [0], 1)[0] is root
    cache.put([1, 2])
    assert cache.match([1, 2]).depth == 1
    cache.check(node)
    cache.radix.unlock(node)
    cache.radix.unlock(root)
    cache.check()


def test_the_heap_of_leaves_stays_small() -> None:
    cache = Cache()
    cache.put([1, 2])
    for _ in range(5000):
        node = cache.match([1, 2])
        cache.radix.lock(node)
        cache.radix.unlock(node)
    assert len(cache.radix._leaves) < 2000
    assert cache.radix.evict(1) == 1


class Model:
    """What the tree should contain: prefixes, and how often each is locked."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, tuple[int, ...]], int] = {}
        self.held: list[tuple[Node, str, tuple[int, ...]]] = []

    def longest(self, namespace: str, tokens: tuple[int, ...]) -> int:
        depth = 0
        while (depth + 1) * PAGE <= len(tokens) and (namespace, tokens[: (depth + 1) * PAGE]) in self.pages:
            depth += 1
        return depth

    def is_locked(self, key: tuple[str, tuple[int, ...]]) -> bool:
        return any(space == key[0] and tokens[: len(key[1])] == key[1] for _, space, tokens in self.held)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_tree_does_what_a_dictionary_does(seed: int) -> None:
    rng, cache, model = random.Random(seed), Cache(12), Model()
    for _ in range(60):
        namespace = rng.choice(["", "salt"])
        tokens = tuple(rng.choices([0, 1], k=PAGE * rng.randrange(0, 5)))
        action = rng.random()
        node = cache.match(list(tokens), namespace)
        assert node.depth == model.longest(namespace, tokens)
        if action < 0.5:
            missing = len(tokens) // PAGE - node.depth
            cache.radix.lock(node)
            if missing > cache.pool.num_free + cache.radix.num_evictable:
                cache.radix.unlock(node)
                continue
            cache.radix.evict(missing - cache.pool.num_free)
            model.pages = {key: page for key, page in model.pages.items() if _is_cached(cache, key)}
            own = cache.pool.allocate(missing)
            pages = node.page_ids + own
            end, duplicates = cache.radix.insert(node, tokens[node.depth * PAGE :], own, len(tokens) // PAGE)
            assert not duplicates
            model.held.append((end, namespace, tokens))
            for depth, page in enumerate(pages, start=1):
                model.pages[namespace, tokens[: depth * PAGE]] = page
        elif action < 0.8 and model.held:
            cache.radix.unlock(model.held.pop(rng.randrange(len(model.held)))[0])
        else:
            evictable = [key for key in model.pages if not model.is_locked(key)]
            assert cache.radix.num_evictable == len(evictable)
            count = rng.randrange(4)
            assert cache.radix.evict(count) == min(count, len(evictable))
            model.pages = {key: page for key, page in model.pages.items() if _is_cached(cache, key)}
        assert {node.page_id for node in cache.radix.nodes()} == set(model.pages.values())
        assert all(_is_cached(cache, key) for key in model.pages if model.is_locked(key))
        cache.check(*(node for node, _, _ in model.held))


def _is_cached(cache: Cache, key: tuple[str, tuple[int, ...]]) -> bool:
    return cache.match(list(key[1]), key[0]).depth * PAGE == len(key[1])


def test_integrity_sees_a_lost_lock() -> None:
    cache = Cache()
    node = cache.hold([1, 2])
    with pytest.raises(AssertionError, match="locks"):
        cache.radix.check_integrity([])
    with pytest.raises(AssertionError, match="locks"):
        cache.radix.check_integrity([node, node])
