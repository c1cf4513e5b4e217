"""The pages of a layer group in the prefix cache: which node of the radix tree has which page, who uses it. No jax.

A node always has its page of group 0. Its page of another group may have been evicted: pages that no request uses go
first, and the node stays. A prefix is usable only if all pages are present that the token after it needs; `served`
finds the longest such prefix. Requests lock only those pages, so older pages of a long prefix can be evicted while it
is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node


class CachedPages:
    """Owns the pages of nodes until `evict` or `forget` returns them to the pool.

    first_of_prefix: takes the number of pages of a prefix, returns the index of the first that the token after it needs
    on_evicted: called by `evict` with each node and its page, before the page is freed
    """

    def __init__(self, pool: PagePool, first_of_prefix: Callable[[int], int]) -> None:
        self.first_of_prefix = first_of_prefix
        self.on_evicted: Callable[[Node, int], None] | None = None
        self._pool = pool
        self._pages: dict[Node, int] = {}
        self._locks: dict[Node, int] = {}
        self._idle: dict[Node, None] = {}  # unlocked pages, in the order in which they were unlocked

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def num_evictable(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Return the number of pages that `allocate` could return now."""
        return self._pool.num_free + len(self._idle)

    def __contains__(self, node: Node) -> bool:
        return node in self._pages

    def page_of(self, node: Node) -> int | None:
        """Return the page of a node; None if it has none."""
        return self._pages.get(node)

    def served(self, node: Node) -> Node:
        """Return the deepest node on the path to `node` whose prefix is usable; a root always is."""
        deepest, first = node, self.first_of_prefix(node.depth)
        above = node
        while above.depth > first:
            assert above.parent is not None
            if above not in self._pages:
                deepest, first = above.parent, self.first_of_prefix(above.depth - 1)
            above = above.parent
        return deepest

    def path(self, node: Node) -> list[Node]:
        """Return the nodes whose pages the token after the prefix `node` needs."""
        return self.path_from(node, self.first_of_prefix(node.depth))

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

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages for a request. Evicts pages if too few are free."""
        if (missing := count - self._pool.num_free) > 0:
            self.evict(missing)
        return self._pool.allocate(count)

    def lock_prefix(self, node: Node, depth: int) -> list[Node]:
        """Lock the cached pages that a prefix of `depth` pages needs which begins with the prefix of `node`.

        Returns their nodes, for `unlock_all`.
        """
        nodes = [above for above in self.path_from(node, self.first_of_prefix(depth)) if above in self._pages]
        for above in nodes:
            self.lock(above)
        return nodes

    def add_missing(self, node: Node) -> tuple[list[Node], list[int]]:
        """Allocate and lock pages for the nodes that the prefix `node` needs and that have none.

        Returns the nodes and the pages. The caller loads their content before the next step.
        """
        nodes = [above for above in self.path(node) if above not in self]
        pages = self.allocate(len(nodes))
        for above, page in zip(nodes, pages, strict=True):
            self.put(above, page)
        return nodes, pages

    def in_use(self, node: Node) -> bool:
        return node in self._locks

    def put(self, node: Node, page_id: int) -> None:
        """Set and lock the page of a node. Its old page, if it has one, must be unlocked and is freed."""
        assert node.alive and not self.in_use(node)
        self.forget(node)
        self._pages[node], self._locks[node] = page_id, 1

    def take_back(self, node: Node) -> int:
        """Remove and return the page of a node, for its last user. The node stays without a page."""
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

    def unlock_all(self, nodes: Iterable[Node]) -> None:
        """Undo the locks of `lock_prefix` and `add_missing`."""
        for node in nodes:
            self.unlock(node)

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
        """Free the page of a node if nobody uses it. Otherwise its last user frees it if the node left the tree."""
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
        assert self._locks == expected, "locks of cached pages are wrong"
        assert not self._idle.keys() & self._locks.keys(), "a cached page is evictable and in use"
        assert self._idle.keys() | self._locks.keys() == self._pages.keys(), "a cached page is lost"
        assert all(node.alive for node in self._idle), "a cached page that nobody can find"
        return list(self._pages.values())
