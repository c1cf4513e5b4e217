"""Copies of evicted pages in the memory of the host: which pages are found again, and which never are."""

from collections import deque

import pytest

from jaxserve.kv.host_tier import HostTier
from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node, RadixCache
from jaxserve.types.step import PageMove

PAGE = 2


class Cache:
    """A prefix cache of `num_pages` with a tier of `num_slots` below it."""

    def __init__(self, num_slots: int, num_pages: int = 8) -> None:
        self.pool = PagePool(num_pages)
        self.tier = HostTier(num_slots, PAGE)
        self.num_slots = num_slots
        self.radix = RadixCache(self.pool, PAGE, on_evicted=self.tier.store)

    def insert(self, tokens: list[int], namespace: str = "") -> list[int]:
        """Cache the pages of a sequence. Returns their ids."""
        count = len(tokens) // PAGE
        root = self.radix.match_prefix(namespace, tokens, 0)
        self.radix.lock(root)
        pages = self.pool.allocate(count)
        node, duplicates = self.radix.insert(root, tokens, pages, count)
        self.pool.free(duplicates)
        self.radix.unlock(node)
        return pages

    def evict(self, count: int) -> list[PageMove]:
        assert self.radix.evict(count) == count
        return self.tier.take_moves()

    def find(self, tokens: list[int], namespace: str = "") -> list[bytes]:
        root = self.radix.match_prefix(namespace, tokens, 0)
        found = self.tier.find(root, tokens, len(tokens) // PAGE)
        self.tier.check_integrity(self.num_slots)
        return found


def stores(moves: list[PageMove]) -> list[int]:
    assert all(move.kind == "store" for move in moves)
    return [move.page_id for move in moves]


def test_evicted_pages_are_copied_and_found_by_their_prefix() -> None:
    cache = Cache(4)
    pages = cache.insert([1, 2, 3, 4, 5, 6])
    assert cache.tier.take_moves() == [] and cache.find([1, 2]) == []
    moves = cache.evict(3)
    assert stores(moves) == pages[::-1] and len({move.slot for move in moves}) == 3
    found = cache.find([1, 2, 3, 4, 5, 6])
    assert len(found) == 3
    assert cache.find([1, 2, 3, 4, 9, 9]) == found[:2]
    assert cache.find([3, 4]) == cache.find([1, 1, 3, 4]) == [], "the same tokens after other ones"
    assert cache.find([1, 2], namespace="salt") == []
    assert cache.tier.load(found[:2], [6, 7]) == 2
    loads = cache.tier.take_moves()
    slots = {move.page_id: move.slot for move in moves}
    assert loads == [PageMove("load", 6, slots[pages[0]]), PageMove("load", 7, slots[pages[1]])]
    assert (cache.tier.num_stored, cache.tier.num_loaded, cache.tier.num_pages) == (3, 2, 3)


def test_a_prefix_is_found_up_to_the_first_gap() -> None:
    cache = Cache(4)
    cache.insert([1, 2, 3, 4])
    cache.evict(1)  # the second page; the first is still on the device
    assert cache.find([1, 2, 3, 4]) == []
    node = cache.radix.match_prefix("", [1, 2, 3, 4], 2)
    assert node.depth == 1 and len(cache.tier.find(node, [3, 4], 1)) == 1


def test_what_is_there_already_is_not_copied_again() -> None:
    cache = Cache(4)
    cache.insert([1, 2])
    assert len(cache.evict(1)) == 1
    cache.insert([1, 2])
    assert cache.evict(1) == [] and cache.tier.num_pages == 1


def test_the_least_recently_used_copy_is_overwritten() -> None:
    cache = Cache(2)
    cache.insert([1, 2])
    cache.insert([3, 4])
    first, second = cache.evict(2)
    cache.find([1, 2])
    cache.insert([5, 6])
    (third,) = cache.evict(1)
    assert third.slot == second.slot != first.slot
    assert cache.find([3, 4]) == [] and len(cache.find([1, 2])) == len(cache.find([5, 6])) == 1


def test_the_end_of_a_prefix_is_overwritten_before_its_beginning() -> None:
    cache = Cache(3)
    cache.insert([1, 2, 3, 4, 5, 6])
    cache.evict(3)
    assert len(cache.find([1, 2, 3, 4, 5, 6])) == 3
    cache.insert([7, 8])
    cache.evict(1)
    assert len(cache.find([1, 2, 3, 4, 5, 6])) == 2


def test_pages_that_are_overwritten_after_they_were_found_are_not_loaded() -> None:
    cache = Cache(2)
    cache.insert([1, 2, 3, 4])
    cache.evict(2)
    found = cache.find([1, 2, 3, 4])
    cache.insert([7, 8])
    cache.evict(1)
    assert cache.tier.load(found, [6, 7]) == 1
    assert [move.page_id for move in cache.tier.take_moves()] == [6]


def test_clear_and_drop() -> None:
    cache = Cache(4)
    cache.insert([1, 2, 3, 4])
    cache.insert([5, 6])
    node = cache.radix.match_prefix("", [1, 2, 3, 4], 2)
    slots = {move.slot for move in cache.evict(3)}
    cache.tier.drop(node)
    found = cache.find([5, 6])
    assert cache.find([1, 2, 3, 4]) == [] and len(found) == 1
    drops = cache.tier.take_moves()
    assert {move.kind for move in drops} == {"drop"}, "a later process must not find them"
    assert len(drops) == 2 and {move.slot for move in drops} < slots
    cache.tier.load(found, [3])
    cache.tier.clear()
    assert cache.find([5, 6]) == [] and [move.kind for move in cache.tier.take_moves()] == ["load", "clear"]
    cache.insert([5, 6])
    assert cache.evict(1)[0].digest == found[0], "later processes find what is stored after a flush"


def test_a_page_that_is_dropped_takes_all_that_was_computed_from_it() -> None:
    cache = Cache(8)
    cache.insert([1, 2, 3, 4, 5, 6])
    cache.insert([1, 2, 7, 8])
    cache.insert([5, 6])
    node = cache.radix.match_prefix("", [1, 2, 3, 4], 2)
    cache.evict(5)
    cache.tier.drop(node)
    assert len(cache.tier.take_moves()) == 4 and cache.tier.num_pages == 1
    cache.insert([1, 2])
    cache.evict(1)
    assert len(cache.find([1, 2, 7, 8])) == 1, "the pages behind it are gone, too"


def test_what_is_checked_after_a_drop_or_a_flush_stays_away() -> None:
    for flush in (False, True):
        old, cache = Cache(4), Cache(4)
        old.insert([1, 2, 3, 4])
        old.insert([5, 6])
        digests = {move.slot: move.digest for move in old.evict(3)}
        checked: deque[tuple[int, bytes | None]] = deque()
        cache.tier.restore(digests, checked)
        cache.insert([1, 2])
        if flush:
            cache.tier.clear()
        else:
            cache.tier.drop(cache.radix.match_prefix("", [1, 2], 1))
        checked.extend(digests.items())
        assert cache.find([1, 2, 3, 4]) == [] and len(cache.find([5, 6])) == (not flush)
        assert sum(move.kind == "drop" for move in cache.tier.take_moves()) == 3 - (not flush)


def test_a_lost_device_takes_only_the_copies_on_their_way() -> None:
    cache = Cache(8)
    for first in (1, 3, 5, 7):
        cache.insert([first, first + 1])
    cache.evict(1)
    cache.evict(1)
    lost = cache.evict(1)
    cache.tier.load(cache.find([1, 2]), [7])
    cache.radix.evict(1)
    cache.tier.drop(Node((1, 2), 0, Node("", -1, None)))
    cache.tier.recover()
    assert {move.kind for move in cache.tier.take_moves()} == {"drop"}, "those of the drop, and of what is lost"
    assert cache.tier.num_pages == 0 and lost
    cache.insert([1, 2])
    cache.evict(1)
    cache.tier.take_moves()
    cache.tier.take_moves()
    cache.tier.recover()
    assert len(cache.find([1, 2])) == 1 and cache.tier.take_moves() == []
    cache.tier.check_integrity(8)


def test_a_slot_is_counted_once() -> None:
    cache = Cache(4)
    with pytest.raises(AssertionError, match="a slot is lost"):
        cache.tier.check_integrity(5)


def test_a_digest_is_of_the_whole_prefix() -> None:
    root, other = Node("", -1, None), Node("salt", -1, None)
    pages = [Node((1, 2), 0, root), Node((1, 2), 0, other), Node((1, 3), 0, root)]
    pages += [Node((3, 4), 0, page) for page in pages]
    tier = HostTier(1, PAGE)
    digests = {tier.digest(page) for page in pages}
    assert len(digests) == 6 and all(len(digest) == 32 for digest in digests)
    assert len({digest[:8] for digest in digests}) == 3, "of the first page"
    again = Node((3, 4), 9, Node((1, 2), 9, Node("", -1, None)))
    assert HostTier(1, PAGE).digest(again) == pages[3].digest, "so another process finds the page"
    again = Node((3, 4), 9, Node((1, 2), 9, Node("", -1, None)))
    tier.clear(new_weights=True)
    assert tier.digest(again) != pages[3].digest, "the weights may be other ones"


def test_copies_of_an_earlier_process() -> None:
    old, cache = Cache(4), Cache(4)
    old.insert([1, 2, 3, 4, 5, 6])
    digests = {move.slot: move.digest for move in old.evict(3)}
    checked: deque[tuple[int, bytes | None]] = deque()
    cache.tier.restore(digests, checked)
    cache.tier.check_integrity(4)
    first, second, third = sorted(digests, reverse=True)  # stored from the last page to the first
    checked.append((first, digests[first]))
    assert len(cache.find([1, 2, 3, 4, 5, 6])) == 1, "the others are not checked yet"
    checked.extend([(third, None), (second, digests[second])])
    assert len(cache.find([1, 2, 3, 4, 5, 6])) == 2, "the third is damaged"
    cache.insert([7, 8, 9, 9])
    slots = [move.slot for move in cache.evict(2)]
    assert third in slots and not {first, second} & set(slots)


def test_nothing_is_stored_while_every_slot_is_checked() -> None:
    cache = Cache(1)
    checked: deque[tuple[int, bytes | None]] = deque()
    cache.tier.restore([0], checked)
    cache.insert([1, 2])
    assert cache.evict(1) == [] and cache.tier.num_pages == 0
    checked.append((0, None))
    cache.insert([1, 2])
    assert [move.kind for move in cache.evict(1)] == ["drop", "store"]


def test_copies_whose_file_was_cut_are_not_found() -> None:
    cache, checked = Cache(4), deque[tuple[int, bytes | None]]()
    cache.tier.restore([], checked)
    cache.insert([1, 2, 3, 4])
    cache.evict(2)
    assert len(cache.find([1, 2, 3, 4])) == 2
    checked += [(slot, None) for slot in range(4)]
    assert cache.find([1, 2, 3, 4]) == []
    assert [move.kind for move in cache.tier.take_moves()] == ["drop", "drop"]
