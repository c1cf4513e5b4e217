"""The prefix cache: a tree of full KV pages, keyed by the tokens that they hold. No jax, no requests.

One node is one page. The children of a node are keyed by the next page's tokens, so a node identifies the whole prefix
from the root to it. Each namespace (types/page_keys.py) has its own root and shares no pages with others.

    match_prefix -> node      the longest cached prefix; changes nothing
    lock / unlock             a request uses the path: none of its pages may be evicted
    insert                    ownership of computed pages moves from a request to the cache; the path stays locked
    evict                     the least recently used unlocked leaves return to the PagePool

The idea is SGLang's radix attention (Zheng et al., 2024, arXiv:2312.07104), at page granularity. Users hold nodes
instead of page ids. Evicted pages can move to the memory of the host (host_tier.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxserve.kv.page_pool import PagePool


class Node:
    """One cached page. A root (parent None) has no page; its key is the namespace."""

    __slots__ = (
        "alive",
        "children",
        "depth",
        "digest",
        "key",
        "last_used",
        "num_locks",
        "page_id",
        "page_key",
        "parent",
    )

    def __init__(self, key: tuple[int, ...] | str, page_id: int, parent: Node | None) -> None:
        self.key = key
        self.page_id = page_id
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.depth: int = parent.depth + 1 if parent else 0  # number of pages from the root to this node
        self.num_locks = 0
        self.last_used = 0
        self.digest: bytes | None = None  # of the prefix, for the tier in the host's memory; computed at first use
        self.page_key: bytes | None = None  # of the prefix, for the router of several engines
        self.alive = True  # reachable from a root that new requests can match

    @property
    def path(self) -> list[Node]:
        """Return the nodes from the first page to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    @property
    def page_ids(self) -> list[int]:
        return [node.page_id for node in self.path]


class RadixCache:
    """Owns the pages of its nodes until `evict`, `discard` or `flush` returns them to the pool.

    on_removed: called with each node that leaves the tree, in use or not
    on_evicted: called with each node whose page is evicted, before the page is freed
    on_added: called with each node that enters the tree
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        on_removed: Callable[[Node], None] | None = None,
        on_evicted: Callable[[Node], None] | None = None,
        on_added: Callable[[Node], None] | None = None,
    ) -> None:
        self.page_size = page_size
        self.num_pages = 0  # owned by the cache, locked or not
        self.num_evictable = 0  # owned and unlocked
        self._pool = pool
        self._on_removed = on_removed
        self._on_evicted = on_evicted
        self._on_added = on_added
        self._roots: dict[str, Node] = {}
        self._dead: set[Node] = set()  # discarded while locked; the last unlock frees them
        self._clock = itertools.count(1)
        # (last_used, tie, leaf). An entry is stale if its node was used, grew or was removed since; `evict` skips it.
        self._leaves: list[tuple[int, int, Node]] = []

    # --- reading

    def match_prefix(self, namespace: str, tokens: Sequence[int], max_pages: int, hint: Node | None = None) -> Node:
        """Return the node of the longest cached prefix of `tokens`, at most `max_pages` deep, or the root.

        `hint` is an earlier result for the same tokens. The walk starts there, so repeated calls are cheap. Lock the
        node before any other call on the cache, or it may be evicted.
        """
        node = self._start(namespace, max_pages, hint)
        size = self.page_size
        while node.depth < max_pages:
            begin = node.depth * size
            child = node.children.get(tuple(tokens[begin : begin + size]))
            if child is None:
                break
            node = child
        return node

    def _start(self, namespace: str, max_pages: int, hint: Node | None) -> Node:
        while hint is not None and (not hint.alive or hint.depth > max_pages):
            hint = hint.parent
        if hint is None or hint.parent is None:
            return self._roots.get(namespace) or Node(namespace, -1, None)
        return hint

    def num_unlocked(self, node: Node) -> int:
        """Return the number of evictable pages on the path to `node` that locking `node` would protect."""
        count = 0
        above: Node | None = node
        while above is not None and above.parent is not None and above.num_locks == 0:
            count += 1
            above = above.parent
        return count

    # --- use

    def lock(self, node: Node) -> None:
        above: Node | None = node
        while above is not None:
            if above.num_locks == 0:
                self._first_lock(above)
            above.num_locks += 1
            above = above.parent

    def unlock(self, node: Node) -> None:
        """Unlock the path to `node` and mark it as just used. Pages without a lock become evictable."""
        now = next(self._clock)
        above: Node | None = node
        while above is not None:
            above.num_locks -= 1
            if above.num_locks == 0:
                above.last_used = now
                self._last_unlock(above)
            above = above.parent

    def _first_lock(self, node: Node) -> None:
        if node.parent is None:
            self._roots.setdefault(str(node.key), node)
        else:
            self.num_evictable -= 1

    def _last_unlock(self, node: Node) -> None:
        if node.parent is None:
            self._forget_root(node)
        elif not node.alive:
            self._dead.remove(node)
            self._release(node)
        else:
            self.num_evictable += 1
            self._push_leaf(node)

    def insert(
        self, start: Node, tokens: Sequence[int], page_ids: Sequence[int], num_pages: int
    ) -> tuple[Node, list[int]]:
        """Insert the pages of a sequence. The caller must have locked the path up to `start`.

            [0, start.depth)           already in the tree
            [start.depth, num_pages)   the caller's: tokens and page_ids begin here, and page_ids[i] holds the K and V
                                       of tokens [i * page_size, (i + 1) * page_size)

        Returns the node at depth `num_pages`, to which the lock is extended, and the page ids that duplicate a
        cached page in use by another request. The caller keeps owning these duplicates. If the cached copy is
        unlocked, the caller's page replaces it. If `start` was discarded, nothing is inserted.
        """
        duplicates: list[int] = []
        if not start.alive:
            return start, duplicates
        node, size = start, self.page_size
        for i in range(num_pages - start.depth):
            key = tuple(tokens[i * size : (i + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, page_ids[i], node)
                self.num_pages += 1
                if self._on_added is not None:
                    self._on_added(child)
            elif child.num_locks:
                duplicates.append(page_ids[i])
            else:
                self._first_lock(child)
                self._swap(child, page_ids[i])
            child.num_locks += 1
            node = child
        return node, duplicates

    def merge_duplicates(self, node: Node, page_ids: Sequence[int], duplicates: list[int]) -> list[int]:
        """Replace cached pages that only the caller still locks, up to its `node`, by the caller's copies.

        page_ids: the caller's pages from the root on. duplicates: the caller's pages of which the tree had a copy that
        others used. Returns the duplicates that remain.
        """
        left: list[int] = []
        for above, page in zip(node.path, page_ids, strict=False):
            if above.page_id == page:
                continue
            if above.num_locks == 1:
                self._swap(above, page)
            else:
                left.append(page)
        assert set(left) <= set(duplicates)
        return left

    def _swap(self, node: Node, page_id: int) -> None:
        self._pool.free((node.page_id,))
        node.page_id = page_id

    # --- giving pages back

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used first. Returns how many were freed."""
        freed = 0
        while freed < count and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if not node.alive or node.num_locks or node.children or node.last_used != last_used:
                continue
            self._evict_leaf(node)
            freed += 1
        return freed

    def _evict_leaf(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not isinstance(node.key, str)
        if self._on_evicted is not None:
            self._on_evicted(node)
        del parent.children[node.key]
        self._remove(node)
        self.num_evictable -= 1
        self._release(node)
        if parent.parent is None:
            self._forget_root(parent)
        elif parent.num_locks == 0:
            self._push_leaf(parent)

    def discard(self, node: Node) -> None:
        """Remove the first page of the prefix of `node` and everything below it, because the content is not finite."""
        top = next(iter(node.path), None)
        if top is not None and top.alive and top.parent is not None:
            assert not isinstance(top.key, str)
            del top.parent.children[top.key]
            self._kill(top)

    def flush(self) -> None:
        """Remove all nodes. Pages in use are freed when their last user unlocks them; nothing is added to them."""
        for root in self._roots.values():
            root.alive = False
            for top in root.children.values():
                self._kill(top)
            root.children = {}
        self._roots.clear()
        self._leaves.clear()

    def _kill(self, top: Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            node.children = {}
            self._remove(node)
            if node.num_locks:
                self._dead.add(node)
            else:
                self.num_evictable -= 1
                self._release(node)

    def _remove(self, node: Node) -> None:
        node.alive = False
        if self._on_removed is not None:
            self._on_removed(node)

    def _release(self, node: Node) -> None:
        self.num_pages -= 1
        self._pool.free((node.page_id,))

    def _forget_root(self, root: Node) -> None:
        if not root.children and not root.num_locks and self._roots.get(str(root.key)) is root:
            del self._roots[str(root.key)]

    def _push_leaf(self, node: Node) -> None:
        if node.children:
            return
        if len(self._leaves) > 4 * self.num_evictable + 1024:
            self._leaves = [entry for entry in self._leaves if self._is_current(*entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.last_used, next(self._clock), node))

    def _is_current(self, last_used: int, _: int, node: Node) -> bool:
        return node.alive and not node.num_locks and not node.children and node.last_used == last_used

    # --- consistency checks

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes that hold a page."""
        yield from self._dead
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check_integrity(self, locked: Sequence[Node]) -> list[int]:
        """Raise AssertionError unless the tree is consistent and its locks match `locked`. Returns its pages."""
        expected: dict[Node, int] = {}
        for handle in locked:
            for node in handle.path:
                expected[node] = expected.get(node, 0) + 1
        nodes = list(self.nodes())
        for node in nodes:
            assert node.num_locks == expected.pop(node, 0), f"page {node.page_id}: {node.num_locks} locks"
            assert node.parent is not None
            assert node.parent.alive or not node.alive, "a live page below a discarded one"
            assert not node.alive or node.parent.children[node.key] is node, "a page its parent does not know"  # type: ignore[index]
        assert not expected, "a request holds a page that the tree has lost"
        evictable = [node for node in nodes if node.num_locks == 0]
        assert len(nodes) == self.num_pages and len(evictable) == self.num_evictable, "page counts are wrong"
        surfacing = {node for entry in self._leaves if self._is_current(*entry) for node in entry[2:]}
        assert all(node.children or node in surfacing for node in evictable), "a page that could never be evicted"
        assert all(root.children or root.num_locks for root in self._roots.values()), "an empty namespace"
        return [node.page_id for node in nodes]
