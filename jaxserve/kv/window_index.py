"""Which prefixes of the radix cache have their page of the windowed layers too. No jax, no requests.

A node of the tree always has its page of the layers that see everything. Its windowed page may be gone: those of
tokens that no request sees any more go first, and the node stays. A prefix can then be used only where the pages of
the last window before its end are there, in one piece: `served`.

Users lock the windowed pages that they see and no others, so that the rest of a long prefix can go while it is in use.
"""

from __future__ import annotations

from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node
from jaxserve.types.window_size import WindowSize


class WindowIndex:
    """Owns the windowed pages of nodes until `evict` or `forget` hands them back to the pool."""

    def __init__(self, pool: PagePool, size: WindowSize) -> None:
        self._pool = pool
        self._size = size
        self._pages: dict[Node, int] = {}
        self._locks: dict[Node, int] = {}
        self._idle: dict[Node, None] = {}  # not locked; the one unlocked first comes first

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def num_evictable(self) -> int:
        return len(self._idle)

    def __contains__(self, node: Node) -> bool:
        return node in self._pages

    def served(self, node: Node) -> Node:
        """The deepest node on the path to `node` whose last window is all here; a root needs none."""
        deepest, first = node, self._size.first_of_prefix(node.depth)
        above = node
        while above.depth > first:
            assert above.parent is not None
            if above not in self._pages:
                deepest, first = above.parent, self._size.first_of_prefix(above.depth - 1)
            above = above.parent
        return deepest

    def path(self, node: Node) -> list[Node]:
        """The nodes of the last window of the prefix that ends at `node`."""
        nodes: list[Node] = []
        first = self._size.first_of_prefix(node.depth)
        while node.depth > first:
            nodes.append(node)
            assert node.parent is not None
            node = node.parent
        nodes.reverse()
        return nodes

    def num_idle(self, nodes: list[Node]) -> int:
        """How many of them are evictable now and would not be if they were locked."""
        return sum(node in self._idle for node in nodes)

    def is_last_user(self, node: Node) -> bool:
        """Whether the page becomes evictable once it is unlocked."""
        return self._locks[node] == 1

    # --- use

    def in_use(self, node: Node) -> bool:
        return node in self._locks

    def put(self, node: Node, page_id: int) -> None:
        """A page for a node that has none, or one that nobody uses and that makes way; locked by the caller."""
        assert node.alive and not self.in_use(node)
        self.forget(node)
        self._pages[node], self._locks[node] = page_id, 1

    def take_back(self, node: Node) -> int:
        """The page of a node, for its last user. The node stays without one."""
        assert self._locks.pop(node) == 1
        return self._pages.pop(node)

    def lock(self, node: Node) -> int:
        """The page, which stays until it is unlocked."""
        self._idle.pop(node, None)
        self._locks[node] = self._locks.get(node, 0) + 1
        return self._pages[node]

    def unlock(self, node: Node) -> None:
        self._locks[node] -= 1
        if self._locks[node] == 0:
            del self._locks[node]
            if node.alive:
                self._idle[node] = None
            else:
                self._release(node)

    # --- giving pages back

    def evict(self, count: int) -> None:
        """Free up to `count` pages, least recently used first. Their nodes stay."""
        for _ in range(min(count, len(self._idle))):
            node = next(iter(self._idle))
            del self._idle[node]
            self._release(node)

    def forget(self, node: Node) -> None:
        """The node has left the tree. A page in use is freed by its last user."""
        if node in self._idle:
            del self._idle[node]
            self._release(node)

    def _release(self, node: Node) -> None:
        self._pool.free((self._pages.pop(node),))

    # --- proof

    def check_integrity(self, locked: list[Node]) -> list[int]:
        """Raise AssertionError unless the locks are those of `locked` and no page is without use; the pages."""
        expected: dict[Node, int] = {}
        for node in locked:
            expected[node] = expected.get(node, 0) + 1
        assert self._locks == expected, "locks of windowed pages are wrong"
        assert not self._idle.keys() & self._locks.keys(), "a windowed page is evictable and in use"
        assert self._idle.keys() | self._locks.keys() == self._pages.keys(), "a windowed page is lost"
        assert all(node.alive for node in self._idle), "a windowed page that nobody can find"
        return list(self._pages.values())
