"""Which replicas have which prefixes in their caches, as the engines report it. No jax, no requests.

A page is known by its key, which names the whole prefix up to it (types/page_keys.py). So the tree of prefixes is a
dict from keys to replicas, and the prefix of a prompt is walked page by page.

The index has one entry for each distinct page that an engine has cached: an engine reports each page that it evicts. A
replica that died is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.types.page_keys import PageEvents, page_keys, split_keys


class PrefixIndex:
    """page_size: in tokens, of all replicas"""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._holders: dict[bytes, int] = {}  # key -> a bit for each replica that has the page
        self._bits: dict[int, int] = {}  # of each replica: the entries of its pages share one object

    def __len__(self) -> int:
        """Return the number of distinct pages."""
        return len(self._holders)

    def take(self, replica: int, events: PageEvents) -> None:
        """Note what changed in the cache of a replica. Unknown removed pages are ignored."""
        bit, holders = self._bits.setdefault(replica, 1 << replica), self._holders
        for key in split_keys(events.removed):
            self._drop(key, bit)
        for key in split_keys(events.added):
            held = holders.get(key)
            holders[key] = bit if held is None else held | bit

    def _drop(self, key: bytes, bit: int) -> None:
        held = self._holders.get(key, 0) & ~bit
        if held:
            self._holders[key] = held
        else:
            self._holders.pop(key, None)

    def forget(self, replica: int) -> None:
        """Remove all pages of a replica. Cost: proportional to the number of pages of all replicas."""
        bit = 1 << replica
        for key in [key for key, held in self._holders.items() if held & bit]:
            self._drop(key, bit)

    def match(self, namespace: str, prompt: bytes, replicas: Iterable[int]) -> dict[int, int]:
        """Return for each of the replicas how many pages of the prompt it has, from the first page on without a gap.

        prompt: token ids, int32, little-endian
        """
        pages = dict.fromkeys(replicas, 0)
        left = sum(1 << replica for replica in pages)
        depth = 0
        for key in page_keys(namespace, prompt, self._page_size):
            held = left & self._holders.get(key, 0)
            if held != left:
                _note(pages, left ^ held, depth)
                left = held
                if not held:
                    break
            depth += 1
        _note(pages, left, depth)
        return pages


def _note(pages: dict[int, int], bits: int, depth: int) -> None:
    """Note the depth for the replicas of these bits."""
    while bits:
        lowest = bits & -bits
        pages[lowest.bit_length() - 1] = depth
        bits ^= lowest
