"""The prefix cache: a tree of full KV pages, keyed by the tokens that they hold. No jax, no requests.

One node is one page; its children are keyed by the next page's tokens, so a node stands for the whole prefix from
the root to it. A namespace (adapter, cache salt) has a root of its own: equal tokens in two namespaces share nothing.

    match_prefix -> node      the longest cached prefix; changes nothing
    lock / unlock             a request uses the path: none of its pages may be evicted
    insert                    pages computed by a request become the cache's; the request keeps the path locked
    evict                     least recently used unlocked leaves go back to the PagePool

The idea is that of SGLang's radix attention (Zheng et al., 2024, arXiv:2312.07104), at page granularity.
Users hold nodes, not page ids, so that a node may come to stand for a page in another tier of memory.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxserve.kv.page_pool import PagePool


class Node:
    """A cached page. A root (parent None) has none; its key is its namespace."""

    __slots__ = ("alive", "children", "depth", "key", "last_used", "num_locks", "page_id", "parent")

    def __init__(self, key: tuple[int, ...] | str, page_id: int, parent: Node | None) -> None:
        self.key = key
        self.page_id = page_id
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.depth: int = parent.depth + 1 if parent else 0  # pages of the prefix that ends here
        self.num_locks = 0
        self.last_used = 0
        self.alive = True  # reachable from a root that new requests see

    @property
    def path(self) -> list[Node]:
        """The nodes from the first page to this one."""
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
    """Owns the pages of its nodes until `evict`, `discard` or `flush` hands them back to the pool.

    on_removed: called with each node that leaves the tree, in use or not.
    """

    def __init__(self, pool: PagePool, page_size: int, on_removed: Callable[[Node], None] | None = None) -> None:
        self.page_size = page_size
        self.num_pages = 0  # owned, locked or not
        self.num_evictable = 0  # owned and not locked
        self._pool = pool
        self._on_removed = on_removed
        self._roots: dict[str, Node] = {}
        self._dead: set[Node] = set()  # discarded while in use: freed by the last unlock
        self._clock = itertools.count(1)
        # (last_used, tie, leaf): entries whose node was used, grew or went since are skipped when they surface
        self._leaves: list[tuple[int, int, Node]] = []

    # --- reading

    def match_prefix(self, namespace: str, tokens: Sequence[int], max_pages: int, hint: Node | None = None) -> Node:
        """The node of the longest cached prefix of `tokens`, at most `max_pages` deep; a root if there is none.

        `hint` is an earlier answer for the same tokens: the walk starts there, so asking again is cheap.
        Lock the node before anything else is done to the cache, or it may be evicted.
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
        """Pages of the path to `node` that are evictable now and would not be with `node` locked."""
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
                self._leave_lru(above)
            above.num_locks += 1
            above = above.parent

    def unlock(self, node: Node) -> None:
        now = next(self._clock)
        above: Node | None = node
        while above is not None:
            above.num_locks -= 1
            if above.num_locks == 0:
                above.last_used = now
                self._join_lru(above)
            above = above.parent

    def _leave_lru(self, node: Node) -> None:
        if node.parent is None:
            self._roots.setdefault(str(node.key), node)
        else:
            self.num_evictable -= 1

    def _join_lru(self, node: Node) -> None:
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
        """Give the cache the pages of a sequence whose path up to `start` the caller has locked.

            [0, start.depth)           in the tree already
            [start.depth, num_pages)   the caller's: tokens and page_ids begin here, and page_ids[i] holds the K and V
                                       of tokens [i * page_size, (i + 1) * page_size)

        Returns the node of `num_pages`, to which the lock now reaches, and those of the pages that the tree has a
        copy of already, in use by others: they stay the caller's. A copy that nobody uses makes way for the caller's.
        Below a discarded `start` nothing is taken and all stays as it is.
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
            elif child.num_locks:
                duplicates.append(page_ids[i])
            else:
                self._leave_lru(child)
                self._swap(child, page_ids[i])
            child.num_locks += 1
            node = child
        return node, duplicates

    def merge_duplicates(self, node: Node, page_ids: Sequence[int], duplicates: list[int]) -> list[int]:
        """Let the tree use the caller's copies of pages that it alone still locks, down to its `node`.

        page_ids are the caller's from the root on, duplicates those of them that the tree had a copy of, in use by
        others. Returns those that are still so.
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
        """Free up to `count` pages, least recently used first; how many were freed."""
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
        del parent.children[node.key]
        self._remove(node)
        self.num_evictable -= 1
        self._release(node)
        if parent.parent is None:
            self._forget_root(parent)
        elif parent.num_locks == 0:
            self._push_leaf(parent)

    def discard(self, node: Node) -> None:
        """Forget the prefix of `node` from its first page on, with all that grew on it: its content is suspect."""
        top = next(iter(node.path), None)
        if top is not None and top.alive and top.parent is not None:
            assert not isinstance(top.key, str)
            del top.parent.children[top.key]
            self._kill(top)

    def flush(self) -> None:
        """Forget everything. Pages in use are freed when their requests unlock them, and nothing is added to them."""
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

    # --- proof

    def nodes(self) -> Iterator[Node]:
        """Every node that holds a page."""
        yield from self._dead
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check_integrity(self, locked: Sequence[Node]) -> list[int]:
        """Raise AssertionError unless the tree is sound and its locks are those of `locked`; the pages it owns."""
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
