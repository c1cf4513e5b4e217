"""Tracks which prefixes of the radix cache also have their sliding-window pages. No jax, no requests.

A node of the radix tree always has its full-attention page. Its window page may have been evicted: pages that no
request sees any more go first, and the node stays. A prefix is usable only if all pages of the last window before
its end are present; `served` finds the longest such prefix.

Requests lock only the window pages that they see, so older pages of a long prefix can be evicted while it is in use.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node
from jaxserve.types.scheduling import WindowSize


class WindowIndex:
    """Owns the window pages of nodes until `evict` or `forget` returns them to the pool.

    on_evicted: called by `evict` with each node and its page, before the page is freed
    """

    def __init__(self, pool: PagePool, size: WindowSize) -> None:
        self.on_evicted: Callable[[Node, int], None] | None = None
        self._pool = pool
        self._size = size
        self._pages: dict[Node, int] = {}
        self._locks: dict[Node, int] = {}
        self._idle: dict[Node, None] = {}  # unlocked pages, in the order in which they were unlocked

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def num_evictable(self) -> int:
        return len(self._idle)

    def __contains__(self, node: Node) -> bool:
        return node in self._pages

    def page_of(self, node: Node) -> int:
        return self._pages[node]

    def served(self, node: Node) -> Node:
        """Return the deepest node on the path to `node` whose last window is complete; a root always qualifies."""
        deepest, first = node, self._size.first_of_prefix(node.depth)
        above = node
        while above.depth > first:
            assert above.parent is not None
            if above not in self._pages:
                deepest, first = above.parent, self._size.first_of_prefix(above.depth - 1)
            above = above.parent
        return deepest

    def path(self, node: Node) -> list[Node]:
        """Return the nodes of the last window of the prefix that ends at `node`."""
        return self.path_from(node, self._size.first_of_prefix(node.depth))

    def path_from(self, node: Node, first: int) -> list[Node]:
        """Return the nodes from page index `first` to `node`."""
        nodes: list[Node] = []
        while node.depth > first:
            nodes.append(node)
            assert node.parent is not None
            node = node.parent
        nodes.reverse()
        return nodes

    def num_idle(self, nodes: list[Node]) -> int:
        """Return how many of the nodes' pages are evictable now and would not be if they were locked."""
        return sum(node in self._idle for node in nodes)

    def is_last_user(self, node: Node) -> bool:
        """Return whether unlocking the page makes it evictable."""
        return self._locks[node] == 1

    # --- use

    def in_use(self, node: Node) -> bool:
        return node in self._locks

    def put(self, node: Node, page_id: int) -> None:
        """Set and lock the page of a node. Its old page, if it has one, must be unlocked and is freed."""
        assert node.alive and not self.in_use(node)
        self.forget(node)
        self._pages[node], self._locks[node] = page_id, 1

    def take_back(self, node: Node) -> int:
        """Remove and return the page of a node, for its last user. The node stays without a window page."""
        assert self._locks.pop(node) == 1
        return self._pages.pop(node)

    def lock(self, node: Node) -> int:
        """Lock and return the page of a node."""
        self._idle.pop(node, None)
        self._locks[node] = self._locks.get(node, 0) + 1
        return self._pages[node]

    def unlock(self, node: Node) -> None:
        """Unlock the page of a node. Without a lock it becomes evictable, or is freed if the node left the tree."""
        self._locks[node] -= 1
        if self._locks[node] == 0:
            del self._locks[node]
            if node.alive:
                self._idle[node] = None
            else:
                self._release(node)

    # --- giving pages back

    def evict(self, count: int) -> None:
        """Free up to `count` pages, least recently used first. Their nodes stay in the tree."""
        for _ in range(min(count, len(self._idle))):
            node = next(iter(self._idle))
            del self._idle[node]
            if self.on_evicted is not None:
                self.on_evicted(node, self._pages[node])
            self._release(node)

    def forget(self, node: Node) -> None:
        """Note that a node left the tree. A locked page is freed by its last user."""
        if node in self._idle:
            del self._idle[node]
            self._release(node)

    def _release(self, node: Node) -> None:
        self._pool.free((self._pages.pop(node),))

    # --- consistency checks

    def check_integrity(self, locked: list[Node]) -> list[int]:
        """Raise AssertionError unless the locks match `locked` and every page has a node. Returns the pages."""
        expected: dict[Node, int] = {}
        for node in locked:
            expected[node] = expected.get(node, 0) + 1
        assert self._locks == expected, "locks of windowed pages are wrong"
        assert not self._idle.keys() & self._locks.keys(), "a windowed page is evictable and in use"
        assert self._idle.keys() | self._locks.keys() == self._pages.keys(), "a windowed page is lost"
        assert all(node.alive for node in self._idle), "a windowed page that nobody can find"
        return list(self._pages.values())
