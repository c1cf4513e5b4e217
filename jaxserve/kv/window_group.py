"""Pages of the sliding-window layers: which ones running requests hold, and which ones the prefix cache has. No jax.

These layers have their own pool and page tables, beside those of the full-attention layers, with the same indices. A
request holds the pages that a future token, or a token of a step in flight, can see. It releases older pages as its
steps are read (`WindowGroup`):

    index   0 ............... first ..................... first + len(pages)
            |  released       |  cached, locked       | own  |

All pages that a prompt needs are allocated at admission, so a started prompt never waits for pages of this pool.
They cover two chunks and a window if enough pages are free, else at least two windows (`spare`: allocated, not yet
in the page table). A longer prompt reuses its own pages that fell out of the window. A prompt that fits keeps all
its pages for the prefix cache.

A node of the radix tree always has its full-attention page, but its window page may have been evicted (`WindowIndex`):
pages that no request sees any more go first, and the node stays. A prefix is usable only if all pages of the last
window before its end are present; `served` finds the longest such prefix. Requests lock only the window pages that they
see, so older pages of a long prefix can be evicted while it is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node
from jaxserve.types.scheduling import WindowSize
from jaxserve.types.step import Request


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
        """Forget a node that left the tree. Its last user frees a locked page."""
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


@dataclass(slots=True, eq=False)
class WindowPages:
    """The window pages of one request.

    pages[i] is entry first + i of its page table. nodes[i] is the cache node that owns it; None: the request owns
    it. The device has the page table up to index `num_sent`.
    """

    first: int
    pages: list[int]
    nodes: list[Node | None]
    spare: list[int]  # allocated for the rest of the prompt, not yet in the page table
    num_sent: int
    num_read: int  # prompt tokens whose steps have been read; every step in flight begins at or after them
    first_own: int  # first index whose page the request owned, before the cache got some of its pages
    num_lost: int = 0  # own pages that other requests still used when the rest of the prompt needed them
    due: int = 0  # number of read tokens at which `advance` next has work

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def append(self, page_ids: list[int]) -> None:
        self.pages += page_ids
        self.nodes += [None] * len(page_ids)

    def unsent(self) -> tuple[int, list[int]]:
        """Page-table entries that the device does not have yet: the first index and the page ids."""
        first, self.num_sent = self.num_sent, self.end
        return first, self.pages[first - self.first :]


class WindowGroup:
    """Gives requests their window pages and takes them back.

    num_pages: size of the pool. longest: tokens of the longest sequence.
    """

    def __init__(self, num_pages: int, size: WindowSize, longest: int) -> None:
        self.size = size
        self._most = size.decoding
        self.pool = PagePool(num_pages)
        self.index = WindowIndex(self.pool, size)
        # The prefix's last window is locked for the first tokens, so the prompt's own pages need room beside it.
        room = num_pages - size.decoding
        self._max_reserved = min(size.prefilling, room) if room >= size.decoding else num_pages
        # Two windows serve chunks of half a window. More is allocated only if it is free (`surplus`): two whole chunks
        # can need 16 windows, and waiting for these can take long.
        self._min_reserved = min(self._max_reserved, 2 * size.decoding)
        assert num_pages >= size.least(longest)

    # --- counting

    @property
    def num_available(self) -> int:
        """Return the number of pages that `grow` could allocate now."""
        return self.pool.num_free + self.index.num_evictable

    def num_reclaimable(self, request: Request) -> int:
        """Return the number of pages that releasing a running request makes available."""
        held: WindowPages = request.window
        return len(held.spare) + sum(node is None or self.index.is_last_user(node) for node in held.nodes)

    def num_new_pages(self, request: Request, node: Node) -> int:
        """Return the number of available pages that `take` consumes.

        That is the fewest pages to allocate, plus the pages of the prefix to lock.
        """
        return self._num_reserved(request, node.depth) + self.index.num_idle(self.index.path(node))

    def num_new_with(self, request: Request, node: Node, depth: int) -> int:
        """Return the number of available pages that `take` consumes at depth `depth`, if the missing pages are loaded.

        node: the deepest cached node on the way there
        """
        first = self.size.first_of_prefix(depth)
        held = [above for above in self.index.path_from(node, first) if above in self.index]
        to_load = depth - first - len(held)
        return self._num_reserved(request, depth) + to_load + self.index.num_idle(held)

    def num_to_grow(self, request: Request, node: Node) -> int:
        """Return how many more pages a request needs at most while it decodes.

        Pages that it holds, or would take over from the prefix at `node`, are subtracted.
        """
        held: WindowPages | None = request.window
        if held is not None:
            return max(0, self._most - len(held.pages) - len(held.spare))
        return max(0, self._most - self._num_reserved(request, node.depth) - len(self.index.path(node)))

    def _num_reserved(self, request: Request, depth: int, surplus: int = 0) -> int:
        """Return how many pages `take` allocates for the prompt's tokens after a prefix of `depth` pages."""
        most = min(self._max_reserved, self._min_reserved + surplus)
        return min(-(-request.num_tokens // self.size.page_size) - depth, most)

    # --- taking

    def take(self, request: Request, node: Node, surplus: int) -> None:
        """Lock the last window of the prefix `node` and allocate pages for the tokens after it.

        surplus: available pages beyond `num_new_pages`; the prompt gets as many of them as it can use
        """
        nodes = self.index.path(node)
        pages = [self.index.lock(above) for above in nodes]
        first = node.depth - len(nodes)
        request.window = WindowPages(
            first,
            pages,
            [*nodes],
            self._allocate(self._num_reserved(request, node.depth, surplus)),
            num_sent=first,
            num_read=node.depth * self.size.page_size,
            first_own=node.depth,
        )

    def lock_window(self, node: Node, depth: int) -> list[Node]:
        """Lock the cached pages of the last window of a prefix of `depth` pages that begins with the prefix of `node`.

        Returns their nodes, for `unlock_window`.
        """
        nodes = self.index.path_from(node, self.size.first_of_prefix(depth))
        nodes = [above for above in nodes if above in self.index]
        for above in nodes:
            self.index.lock(above)
        return nodes

    def add_missing(self, node: Node) -> tuple[list[Node], list[int]]:
        """Allocate and lock pages for the nodes of the last window of the prefix `node` that have none.

        Returns the nodes and the pages. The caller loads their content before the next step.
        """
        nodes = [above for above in self.index.path(node) if above not in self.index]
        pages = self._allocate(len(nodes))
        for above, page in zip(nodes, pages, strict=True):
            self.index.put(above, page)
        return nodes, pages

    def unlock_window(self, nodes: Iterable[Node]) -> None:
        """Undo the locks of `lock_window` and `add_missing`."""
        for node in nodes:
            self.index.unlock(node)

    def reach(self, request: Request, end: int) -> int:
        """Make pages available for the prompt's tokens up to `end`. Return the position that the pages cover.

        A page that a step in flight can see is not touched.
        """
        held: WindowPages = request.window
        wanted = -(-end // self.size.page_size) - held.end
        if wanted > len(held.spare):
            self._reuse(held, self.size.first_needed(held.num_read))
        lost = min(wanted - len(held.spare), held.num_lost, self.num_available)
        if lost > 0:
            held.spare += self._allocate(lost)
            held.num_lost -= lost
        return min(end, (held.end + len(held.spare)) * self.size.page_size)

    def cover(self, request: Request, end: int) -> tuple[int, list[int]]:
        """Enter the reserved pages of the prompt's tokens up to `end`. Returns (first new index, page ids)."""
        held: WindowPages = request.window
        wanted = -(-end // self.size.page_size) - held.end
        if wanted > 0:
            held.append(held.spare[:wanted])
            del held.spare[:wanted]
        return held.unsent()

    def _reuse(self, held: WindowPages, first: int) -> None:
        """Remove the pages before index `first` from the request.

        A page that only this request uses becomes a `spare` page for the rest of its prompt; if the cache has it, the
        cache loses it. A page that other requests use stays in the cache and is counted in `num_lost`.
        """
        for index in range(max(held.first, held.first_own), min(held.end, first)):
            node = held.nodes[index - held.first]
            if node is None:
                continue
            if self.index.is_last_user(node):
                self.index.take_back(node)
                held.nodes[index - held.first] = None
            else:
                held.num_lost += 1
        held.spare += self._drop(held, first)

    def grow(self, request: Request, count: int) -> tuple[int, list[int]]:
        """Allocate `count` pages for a decoding request. Returns (first new index, page ids)."""
        held: WindowPages = request.window
        held.append(self._allocate(count))
        return held.unsent()

    def _allocate(self, count: int) -> list[int]:
        if (missing := count - self.pool.num_free) > 0:
            self.index.evict(missing)
        return self.pool.allocate(count)

    # --- sharing and giving back

    def commit(self, request: Request, node: Node, depth: int) -> None:
        """Give the cache the window pages of the request's tokens between depth `depth` and `node`.

        Also replace unlocked cached pages by this request's: they would be evicted first, and a prefix with a gap
        cannot be matched.
        """
        held: WindowPages = request.window
        while node.depth > max(held.first, depth):
            i = node.depth - 1 - held.first
            if i < len(held.pages) and held.nodes[i] is None and node.alive and not self.index.in_use(node):
                self.index.put(node, held.pages[i])
                held.nodes[i] = node
            assert node.parent is not None
            node = node.parent

    def advance(self, request: Request, num_tokens: int) -> None:
        """Record that the steps of the first `num_tokens` tokens have been read.

        After the prompt, pages that no later token sees are freed. During the prompt they are kept, for its own
        later chunks and for the prefix cache.
        """
        held: WindowPages = request.window
        held.num_read = num_tokens
        if request.prompt_done:
            first = self.size.first_needed(num_tokens)
            self.pool.free(self._drop(held, first))
            self.pool.free(held.spare)
            held.spare = []
            held.due = self.size.next_release(num_tokens)

    def _drop(self, held: WindowPages, first: int) -> list[int]:
        """Remove the pages before index `first` from the request. Returns those that the request owned."""
        count = max(0, first - held.first)
        own = []
        for page, node in zip(held.pages[:count], held.nodes[:count], strict=True):
            if node is None:
                own.append(page)
            else:
                self.index.unlock(node)
        del held.pages[:count], held.nodes[:count]
        held.first += count
        return own

    def release(self, request: Request) -> None:
        """Free all that a request holds."""
        held: WindowPages = request.window
        self.pool.free(self._drop(held, held.end))
        self.pool.free(held.spare)
        request.window = None

    # --- consistency checks

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every page of the pool is exactly once free, cached or held."""
        owned, locked = [], []
        for request in holders:
            held: WindowPages = request.window
            assert len(held.pages) == len(held.nodes)
            owned += held.spare
            for i, (page, node) in enumerate(zip(held.pages, held.nodes, strict=True), start=held.first + 1):
                if node is None:
                    owned.append(page)
                else:
                    assert node.depth == i, "a windowed page at another place than in the cache"
                    locked.append(node)
        self.pool.check_integrity(owned + self.index.check_integrity(locked))
