"""The second tier of the prefix cache: copies of evicted pages in the memory of the host. No jax, no requests.

A `HostTier` has the copies of one layer group. `HostTiers` has a tier for each group and knows which prefixes they
complete.

A page is known by a digest of its namespace and of all tokens up to its end. So a tier has no tree: the pages of a
prefix are looked up one after the other. A digest begins with the first bytes of the digest of the prefix's first page,
so that all prefixes that begin with a page can be dropped.

A page is copied when it is evicted, so a cache with enough room copies nothing. The copy stays if the page is loaded
again: its next eviction costs nothing. The least recently used copy is overwritten first. Copies of an earlier process
are found if they are in a file (runtime/page_file.py), each after a thread has checked it.

    store        device -> host, when a page is evicted
    load         host -> device, when a request starts
    take_moves   the copies that the next step makes first, in this order

A prefix can be loaded up to the deepest page at which every group has the pages that a later token needs. Full
attention needs all pages, and other groups those from `first_of_prefix` on. A page may be on the device or in a tier.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxserve.kv.groups.base import LayerGroup
from jaxserve.kv.radix_cache import Node
from jaxserve.types.page_keys import token_bytes
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import PageMove

_FIRST = 8  # bytes at the beginning of a digest that name the prefix's first page


class HostTier:
    """Knows which page each slot of the host's memory holds, and chooses the slots.

    num_slots: pages that the host's memory has room for. num_stored, num_loaded: pages copied so far.

    group: index of the layer group whose pages these are. digest: computes the digest of a node, if another tier of the
    same prefixes does; None: this tier does. kept: digests of copies that must not be overwritten now
    """

    def __init__(
        self, num_slots: int, page_size: int, *, group: int = 0, digest: Callable[[Node], bytes] | None = None
    ) -> None:
        self.num_stored = self.num_loaded = 0
        self.kept: set[bytes] = set()
        self.digest = self._own_digest if digest is None else digest
        self._group = group
        self._page_size = page_size
        self._salt = b""  # goes into every digest; changes with an update of the weights
        self._free = list(range(num_slots - 1, -1, -1))  # slots without a page, also in the file
        self._unchecked: set[int] = set()  # slots with pages of an earlier process
        self._refused: set[bytes] = set()  # first bytes of digests that were dropped while some were unchecked
        self._cleared = False  # every unchecked copy is refused
        self._checked: deque[tuple[int, bytes | None]] = deque()
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by digest, least recently used first
        self._moves: list[PageMove] = []
        self._sent: deque[list[int]] = deque(maxlen=2)  # slots stored by the two latest steps, perhaps not copied yet

    @property
    def num_pages(self) -> int:
        """Number of pages that the tier holds."""
        return len(self._slots)

    @property
    def num_new_loads(self) -> int:
        """Number of pages that the next step loads so far."""
        return sum(move.kind == "load" for move in self._moves)

    def restore(self, slots: Iterable[int], checked: deque[tuple[int, bytes | None]]) -> None:
        """Take over the copies of an earlier process. Call it before any other method.

        slots: the slots with copies. checked: (slot, digest) of each, in any order, as a thread appends them. A digest
        of None means that the copy is damaged. A copy of this process may be damaged too.
        """
        self._unchecked = set(slots)
        self._checked = checked
        self._free = [slot for slot in self._free if slot not in self._unchecked]

    def take_checked(self) -> None:
        """Take over the copies that were checked meanwhile, and drop those that were lost."""
        lost: set[int] = set()
        while self._checked:
            slot, digest = self._checked.popleft()
            if slot not in self._unchecked:
                lost.add(slot)
                continue
            self._unchecked.remove(slot)
            if self._cleared or digest is None or digest in self._slots or digest[:_FIRST] in self._refused:
                self._give_up(slot)
            else:
                self._slots[digest] = slot
                self._slots.move_to_end(digest, last=False)
        if lost:
            self._give_up_all(lost)

    # --- copies

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def store(self, node: Node) -> None:
        """Keep a copy of a full-attention page that is evicted now."""
        self.store_page(node, node.page_id)

    def store_page(self, node: Node, page_id: int) -> None:
        """Keep a copy of the page of a node, which is evicted now."""
        self.take_checked()
        digest = self.digest(node)
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return
        if not (self._free or self._slots):
            return  # all copies of an earlier process are still being checked
        if not self._free and next(iter(self._slots)) in self.kept:
            return  # kept copies were used last, so all copies are kept
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[digest] = slot
        self._moves.append(PageMove("store", page_id, slot, digest, self._group))
        self.num_stored += 1

    def find(self, node: Node, tokens: Sequence[int], num_pages: int) -> list[bytes]:
        """Return the digests of the pages after `node` that the tier has without a gap, at most `num_pages`.

        tokens: at least `num_pages` pages of tokens, which follow the prefix of `node`. The pages found count as used.
        """
        self.take_checked()
        found: list[bytes] = []
        for digest in self._digests(self.digest(node), tokens, num_pages):
            if digest not in self._slots:
                break
            found.append(digest)
        self.use(found)
        return found

    def use(self, digests: Sequence[bytes]) -> None:
        """Record that these copies are used. digests: in the order of the prefix"""
        for digest in reversed(digests):  # the first page is overwritten last: without it the others are of no use
            self._slots.move_to_end(digest)

    def _digests(self, digest: bytes, tokens: Sequence[int], num_pages: int) -> Iterator[bytes]:
        for begin in range(0, num_pages * self._page_size, self._page_size):
            digest = _extended(digest, tokens[begin : begin + self._page_size])
            yield digest

    def load(self, digests: Sequence[bytes], page_ids: Sequence[int]) -> int:
        """Copy pages to the free pages `page_ids` of the device. Return their number, up to the first that is gone."""
        count = 0
        for digest, page_id in zip(digests, page_ids, strict=False):
            slot = self._slots.get(digest)
            if slot is None:
                break
            self._moves.append(PageMove("load", page_id, slot, group=self._group))
            count += 1
        self.num_loaded += count
        return count

    def take_moves(self) -> list[PageMove]:
        """Return the copies to make before the next step, in order."""
        moves, self._moves = self._moves, []
        self._sent.append([move.slot for move in moves if move.kind == "store"])
        return moves

    # --- giving up

    def drop(self, node: Node) -> None:
        """Drop the copies of all prefixes with the first page of `node`, also for later processes."""
        first = next(iter(node.path), None)
        if first is None:
            return
        begin = self.digest(first)[:_FIRST]
        for digest in [digest for digest in self._slots if digest[:_FIRST] == begin]:
            self._give_up(self._slots.pop(digest))
        if self._unchecked:
            self._refused.add(begin)

    def _give_up(self, slot: int) -> None:
        self._free.append(slot)
        self._moves.append(PageMove("drop", slot=slot, group=self._group))

    def _give_up_all(self, slots: set[int]) -> None:
        """Drop the copies in `slots`, some of which may have none."""
        for digest in [digest for digest, slot in self._slots.items() if slot in slots]:
            self._give_up(self._slots.pop(digest))

    def clear(self, *, new_weights: bool = False) -> None:
        """Drop all copies, also for later processes.

        new_weights: find no later copy under the digests of now, in this process or another.
        Moves that wait for the next step stay, because a request may have started on their pages.
        """
        if new_weights:
            self._salt = secrets.token_bytes(16)
        self._free += self._slots.values()
        self._slots.clear()
        self._cleared = True
        self._moves.append(PageMove("clear", group=self._group))

    def recover(self) -> None:
        """Drop waiting moves and the copies that may not have been made, because the device's state is lost."""
        waiting, self._moves = self._moves, [move for move in self._moves if move.kind in ("drop", "clear")]
        self._give_up_all({move.slot for move in waiting if move.kind == "store"}.union(*self._sent))

    def _own_digest(self, node: Node) -> bytes:
        """Return the digest of the prefix that ends with the page of `node`. Each node of its path keeps its digest."""
        missing: list[Node] = []
        above = node
        while above.digest is None and above.parent is not None:
            missing.append(above)
            above = above.parent
        key = str(above.key).encode(errors="surrogatepass")
        digest = above.digest or hashlib.sha256(self._salt + key).digest()[:-_FIRST]
        above.digest = digest
        for below in reversed(missing):
            assert not isinstance(below.key, str)
            digest = below.digest = _extended(digest, below.key)
        return digest

    def check_integrity(self, num_slots: int) -> None:
        """Raise AssertionError unless every slot is exactly once free or in use."""
        slots = [*self._free, *self._slots.values(), *self._unchecked]
        assert sorted(slots) == list(range(num_slots)), "a slot is lost, or used twice"


def _extended(digest: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a prefix with one more page. The digest of an empty prefix is shorter by _FIRST bytes."""
    new = hashlib.sha256(digest + token_bytes(tokens)).digest()
    return (digest[:_FIRST] if len(digest) == len(new) else new[-_FIRST:]) + new[:-_FIRST]


@dataclass(frozen=True)
class StoredPrefix:
    """A prefix that can be used once its pages are loaded.

    node: its deepest node whose full-attention page is cached. after: digests of the pages to load behind it
    """

    node: Node
    after: list[bytes]

    @property
    def depth(self) -> int:
        """Number of pages of the prefix."""
        return self.node.depth + len(self.after)


class HostTiers:
    """The tiers of all layer groups.

    tiers: by group; `full` is the one of group 0, whose pages a prefix needs all of
    """

    def __init__(self, config: SchedulerConfig, groups: Sequence[LayerGroup]) -> None:
        self._groups = groups
        self._page_size = config.page_size
        self._num_slots = [config.num_host_pages, *(group.num_host_pages for group in config.groups)]
        self.full = HostTier(config.num_host_pages, config.page_size)
        self.tiers = [self.full]
        for group in groups:
            tier = HostTier(self._num_slots[group.index], config.page_size, group=group.index, digest=self.full.digest)
            group.cached.on_evicted = tier.store_page
            self.tiers.append(tier)

    def store(self, node: Node) -> None:
        """Keep copies of the pages of a node that is evicted now."""
        self.full.store(node)
        for group in self._groups:
            if (page := group.cached.page_of(node)) is not None:
                self.tiers[group.index].store_page(node, page)

    # --- finding

    def find(self, node: Node, tokens: Sequence[int]) -> StoredPrefix:
        """Return the longest prefix that can be loaded and begins with the prefix of `node`.

        node: the deepest node of the request whose page of group 0 is cached. If another group lacks pages, the prefix
        may end before it. tokens: the tokens after it, in whole pages
        """
        after = self.full.find(node, tokens, len(tokens) // self._page_size)
        if not self._groups:
            return StoredPrefix(node, after)
        for tier in self.tiers[1:]:
            tier.take_checked()
        prefix = self._usable(StoredPrefix(node, after))
        for group in self._groups:
            self.tiers[group.index].use(self.missing(group, prefix))
        return prefix

    def _usable(self, prefix: StoredPrefix) -> StoredPrefix:
        """Return the longest beginning of a prefix for which every group has its pages."""
        while True:
            before = prefix.depth
            for group in self._groups:
                prefix = self._cut(prefix, self._usable_depth(group, prefix))
            if prefix.depth == before or len(self._groups) == 1:
                return prefix

    def _cut(self, prefix: StoredPrefix, depth: int) -> StoredPrefix:
        node, after = prefix.node, prefix.after[: max(0, depth - prefix.node.depth)]
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        return StoredPrefix(node, after)

    def _usable_depth(self, group: LayerGroup, prefix: StoredPrefix) -> int:
        """Return the depth of the longest beginning of a prefix for which a group has its pages."""
        deepest = prefix.depth
        first, above = group.cached.first_of_prefix(deepest), prefix.node
        for depth in range(deepest, 0, -1):
            if depth <= first:
                break
            while above.depth > depth:
                assert above.parent is not None
                above = above.parent
            if not self._has_page(group, above, depth, prefix):
                deepest, first = depth - 1, group.cached.first_of_prefix(depth - 1)
        return deepest

    def _has_page(self, group: LayerGroup, above: Node, depth: int, prefix: StoredPrefix) -> bool:
        tier = self.tiers[group.index]
        if depth > prefix.node.depth:
            return prefix.after[depth - prefix.node.depth - 1] in tier
        return group.cached.page_of(above) is not None or self.full.digest(above) in tier

    def missing(self, group: LayerGroup, prefix: StoredPrefix) -> list[bytes]:
        """Return the digests of the pages of a group that a prefix needs and that are not on the device."""
        first = group.cached.first_of_prefix(prefix.depth)
        before: list[bytes] = []
        node = prefix.node
        while node.depth > first:
            if group.cached.page_of(node) is None:
                before.append(self.full.digest(node))
            assert node.parent is not None
            node = node.parent
        return [*reversed(before), *prefix.after[max(0, first - prefix.node.depth) :]]

    # --- all tiers

    def keep(self, prefix: StoredPrefix | None) -> None:
        """Overwrite no copy that `prefix` needs, until the next call."""
        if self._groups:
            self.full.kept = set() if prefix is None else set(prefix.after)
        for group in self._groups:
            self.tiers[group.index].kept = set() if prefix is None else set(self.missing(group, prefix))

    def take_moves(self) -> list[PageMove]:
        """Return the copies to make before the next step, in order."""
        return [move for tier in self.tiers for move in tier.take_moves()]

    def drop(self, node: Node) -> None:
        """Drop the copies of all prefixes with the first page of `node`, also for later processes."""
        for tier in self.tiers:
            tier.drop(node)

    def clear(self, *, new_weights: bool = False) -> None:
        """See `HostTier.clear`."""
        for tier in self.tiers:
            tier.clear(new_weights=new_weights)

    def recover(self) -> None:
        """See `HostTier.recover`."""
        for tier in self.tiers:
            tier.recover()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is exactly once free or in use."""
        for tier, num_slots in zip(self.tiers, self._num_slots, strict=True):
            tier.check_integrity(num_slots)
