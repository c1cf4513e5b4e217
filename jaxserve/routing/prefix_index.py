"""Which replicas have which prefixes in their caches, as the engines report it. No jax, no requests.

A page is known by its key, which names the whole prefix up to it (types/page_keys.py). So the tree of prefixes is a
dict from keys to replicas, and the prefix of a prompt is walked page by page.

The index has one entry for each distinct page that an engine has cached: an engine reports each page that it evicts. A
replica that died is forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from jaxserve.types.page_keys import PageEvents, page_keys, split_keys

Key = TypeVar("Key", bound=Hashable)


class PrefixHolders(Generic[Key]):
    """The replicas that have each key. A key names a piece of a prompt and all pieces before it."""

    def __init__(self) -> None:
        self._holders: dict[Key, int] = {}  # key -> a bit for each replica that has it
        self._bits: dict[int, int] = {}  # of each replica: the entries of its keys share one object

    def __len__(self) -> int:
        """Return the number of distinct keys."""
        return len(self._holders)

    def __contains__(self, key: Key) -> bool:
        return key in self._holders

    def add(self, replica: int, keys: Iterable[Key]) -> None:
        """Note that a replica has these keys."""
        bit, holders = self._bits.setdefault(replica, 1 << replica), self._holders
        for key in keys:
            held = holders.get(key)
            holders[key] = bit if held is None else held | bit

    def remove(self, replica: int, keys: Iterable[Key]) -> None:
        """Note that a replica has these keys no more. Unknown ones are ignored."""
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
                _note(found, left ^ held, depth)
                left = held
                if not held:
                    break
            depth += 1
        _note(found, left, depth)
        return found


def _note(found: dict[int, int], bits: int, depth: int) -> None:
    """Note the depth for the replicas of these bits."""
    while bits:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = depth
        bits ^= lowest


class PrefixIndex:
    """Knows the cached pages of every replica. page_size: in tokens, of all replicas"""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: PrefixHolders[bytes] = PrefixHolders()

    def __len__(self) -> int:
        """Return the number of distinct pages."""
        return len(self._pages)

    def take(self, replica: int, events: PageEvents) -> None:
        """Note what changed in the cache of a replica. Unknown removed pages are ignored."""
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
