"""Chooses the replica for a request: by its load, and by how much of the prompt is in its prefix cache. No jax.

    the loads differ by more than MAX_SPREAD and by more than MAX_RATIO   the least loaded
    a replica has more than half of the prompt                            the replica that has most of it
    otherwise                                                             the least of load minus matched pages

A load is a number of sequences. Batch requests go to the least loaded replica, because no client waits for them.

The `PrefixIndex` knows which replicas have which prefixes in their caches, as the engines report it. A page is known by
its key, which names the whole prefix up to it (types/page_keys.py). So the tree of prefixes is a dict from keys to
replicas, and the prefix of a prompt is walked page by page. The index has one entry for each distinct page that an
engine has cached: an engine reports each page that it evicts. A replica that died is forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from jaxserve.types.page_keys import TOKEN_BYTES, PageEvents, page_keys, split_keys

Key = TypeVar("Key", bound=Hashable)


class PrefixHolders(Generic[Key]):
    """The replicas that have each key. A key names a piece of a prompt and all pieces before it."""

    def __init__(self) -> None:
        self._holders: dict[Key, int] = {}  # key -> a bit for each replica that has it
        self._bits: dict[int, int] = {}  # replica -> its bit; all entries of its keys share this object

    def __len__(self) -> int:
        """Return the number of distinct keys."""
        return len(self._holders)

    def __contains__(self, key: Key) -> bool:
        return key in self._holders

    def add(self, replica: int, keys: Iterable[Key]) -> None:
        """Record that a replica has these keys."""
        bit, holders = self._bits.setdefault(replica, 1 << replica), self._holders
        for key in keys:
            held = holders.get(key)
            holders[key] = bit if held is None else held | bit

    def remove(self, replica: int, keys: Iterable[Key]) -> None:
        """Record that a replica does not have these keys any more. Unknown keys are ignored."""
        bit = 1 << replica
        for key in keys:
            held = self._holders.get(key, 0) & ~bit
            if held:
                self._holders[key] = held
            else:
                self.drop(key)

    def drop(self, key: Key) -> None:
        """Remove a key from all replicas that have it."""
        self._holders.pop(key, None)

    def forget(self, replica: int) -> None:
        """Remove all keys of a replica. Cost: proportional to the number of keys of all replicas."""
        bit = 1 << replica
        self.remove(replica, [key for key, held in self._holders.items() if held & bit])

    def match(self, keys: Iterable[Key], replicas: Iterable[int]) -> dict[int, int]:
        """Return for each of the replicas how many of the keys it has, from the first one on without a gap."""
        found = dict.fromkeys(replicas, 0)
        left = sum(1 << replica for replica in found)
        depth = 0
        for key in keys:
            held = left & self._holders.get(key, 0)
            if held != left:
                _record_depth(found, left ^ held, depth)
                left = held
                if not held:
                    break
            depth += 1
        _record_depth(found, left, depth)
        return found


def _record_depth(found: dict[int, int], bits: int, depth: int) -> None:
    """Record the depth for the replicas of these bits."""
    while bits:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = depth
        bits ^= lowest


class PrefixIndex:
    """Knows the cached pages of every replica. page_size: tokens, the same in all replicas"""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: PrefixHolders[bytes] = PrefixHolders()

    def __len__(self) -> int:
        """Return the number of distinct pages."""
        return len(self._pages)

    def update(self, replica: int, events: PageEvents) -> None:
        """Record the changes of a replica's cache. Unknown removed pages are ignored."""
        self._pages.remove(replica, split_keys(events.removed))
        self._pages.add(replica, split_keys(events.added))

    def forget(self, replica: int) -> None:
        """Remove all pages of a replica. Cost: proportional to the number of pages of all replicas."""
        self._pages.forget(replica)

    def match(self, namespace: str, prompt: bytes, replicas: Iterable[int]) -> dict[int, int]:
        """Return for each of the replicas how many pages of the prompt it has, from the first page on without a gap.

        prompt: token ids, int32, little-endian
        """
        return self._pages.match(page_keys(namespace, prompt, self._page_size), replicas)


MAX_SPREAD = 8  # sequences by which the loads may differ
MAX_RATIO = 1.5  # the largest load divided by the least

Reason = Literal["only", "load", "prefix", "mixed"]


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of a replica that may get a request. pages_used: the share of its KV pages that requests hold now"""

    replica: int
    num_live: int  # sequences that were sent to it and have not ended
    pages_used: float = 0.0

    @property
    def order(self) -> tuple[int, float, int]:
        return self.num_live, self.pages_used, self.replica


class Router:
    """Chooses replicas by the rules above.

    page_size: tokens, the same in all replicas. reasons: how often each rule has chosen
    """

    def __init__(self, page_size: int) -> None:
        self.index = PrefixIndex(page_size)
        self.reasons: Counter[Reason] = Counter()
        self._page_bytes = page_size * TOKEN_BYTES

    def update(self, replica: int, events: PageEvents) -> None:
        """Record the changes of a replica's prefix cache."""
        self.index.update(replica, events)

    def forget(self, replica: int) -> None:
        """Forget the cache of a replica that died."""
        self.index.forget(replica)

    def num_cached(self, replica: int, prompt: bytes, namespace: str = "") -> int:
        """Return how many tokens of a prompt a replica has in its prefix cache."""
        return self.index.match(namespace, prompt, [replica])[replica] * self._page_bytes // TOKEN_BYTES

    def choose(self, loads: Sequence[ReplicaLoad], prompt: bytes, namespace: str = "", *, batch: bool = False) -> int:
        """Return the replica for a request.

        loads: the loads of the replicas that may get it, at least one. prompt: token ids, int32, little-endian.
        namespace: namespace of the prefix cache. batch: whether the request belongs to a batch
        """
        replica, reason = self._choose(loads, prompt, namespace, batch=batch)
        self.reasons[reason] += 1
        return replica

    def _choose(
        self, loads: Sequence[ReplicaLoad], prompt: bytes, namespace: str, *, batch: bool
    ) -> tuple[int, Reason]:
        if len(loads) == 1:
            return loads[0].replica, "only"
        ordered = sorted(loads, key=lambda load: load.order)
        least, most = ordered[0].num_live, ordered[-1].num_live
        if batch or (most - least > MAX_SPREAD and most > MAX_RATIO * least):
            return ordered[0].replica, "load"
        pages = self.index.match(namespace, prompt, [load.replica for load in ordered])
        best = max(pages, key=pages.__getitem__)  # among equal replicas the least loaded, which comes first
        if 2 * pages[best] * self._page_bytes > len(prompt):
            return best, "prefix"
        return min(ordered, key=lambda load: load.num_live - pages[load.replica]).replica, "mixed"
