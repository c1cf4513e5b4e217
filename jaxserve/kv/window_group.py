"""The pages of the layers with a sliding window: what running requests hold of them. Takes, grows and gives back.

A group of its own beside the full one: own pool, own page tables, the same indices. A request holds the pages that a
token to come, or one in a step in flight, can see, and gives back those before as its steps are read:

    index   0 ............... first ..................... first + len(pages)
            |  given back     |  the cache's, locked | own  |

A prompt's pages are taken at once when the request is admitted, as many as two chunks and a window need at most
(`spare`), or where they are scarce fewer, down to two windows; a longer prompt goes on with those of its own that have
fallen out of the window. So a prompt that has begun never waits for pages of this group, and those of a prompt that is
short enough are all there for the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node
from jaxserve.kv.window_index import WindowIndex
from jaxserve.types.request import Request
from jaxserve.types.window_size import WindowSize


@dataclass(slots=True, eq=False)
class WindowPages:
    """What one request holds. pages[i] is at index first + i of its page table; nodes[i] is the cache's node that owns
    it, None where the request does. The device has the table up to index `num_sent`."""

    first: int
    pages: list[int]
    nodes: list[Node | None]
    spare: list[int]  # for the rest of the prompt
    num_sent: int
    num_read: int  # of the prompt, tokens whose steps have been read: no step in flight begins before
    first_own: int  # index from which on the pages were the request's own, before the cache got some
    num_lost: int = 0  # of its own, still used by others when it needed them for the rest of the prompt
    due: int = 0  # tokens read at which there is something for `advance` to do

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def append(self, page_ids: list[int]) -> None:
        self.pages += page_ids
        self.nodes += [None] * len(page_ids)

    def unsent(self) -> tuple[int, list[int]]:
        """Page-table entries that the device lacks: the first index and the page ids."""
        first, self.num_sent = self.num_sent, self.end
        return first, self.pages[first - self.first :]


class WindowGroup:
    """num_pages: of the pool. longest: tokens of the longest sequence."""

    def __init__(self, num_pages: int, size: WindowSize, longest: int) -> None:
        self.size = size
        self._most = size.decoding
        self.pool = PagePool(num_pages)
        self.index = WindowIndex(self.pool, size)
        # Beside a prefix's last window, which is locked for the first tokens, there must be room for the prompt's own.
        room = num_pages - size.decoding
        self._max_hand = min(size.prefilling, room) if room >= size.decoding else num_pages
        # Enough for chunks of half a window. More may be long in coming: two chunks can be as many as 16 windows.
        self._min_hand = min(self._max_hand, 2 * size.decoding)
        assert num_pages >= size.least(longest)

    # --- counting

    @property
    def num_available(self) -> int:
        """Pages that `grow` could give now."""
        return self.pool.num_free + self.index.num_evictable

    def num_reclaimable(self, request: Request) -> int:
        """Pages that become available once a running request is released."""
        held: WindowPages = request.window
        return len(held.spare) + sum(node is None or self.index.is_last_user(node) for node in held.nodes)

    def num_new_pages(self, request: Request, node: Node) -> int:
        """Pages that `take` must find: the fewest to allocate, and those of the prefix that can then not be evicted."""
        return self._hand(request, node) + self.index.num_idle(self.index.path(node))

    def num_to_grow(self, request: Request, node: Node) -> int:
        """Pages that a request holds at most while it decodes, less those that it has, or would take beside `node`."""
        held: WindowPages | None = request.window
        if held is not None:
            return max(0, self._most - len(held.pages) - len(held.spare))
        return max(0, self._most - self._hand(request, node) - len(self.index.path(node)))

    def _hand(self, request: Request, node: Node, surplus: int = 0) -> int:
        most = min(self._max_hand, self._min_hand + surplus)
        return min(-(-request.num_tokens // self.size.page_size) - node.depth, most)

    # --- taking

    def take(self, request: Request, node: Node, surplus: int) -> None:
        """The last window of the prefix `node`, and pages for the tokens behind it: of the `surplus`, available pages
        beyond `num_new_pages`, as many as a prompt can use."""
        nodes = self.index.path(node)
        pages = [self.index.lock(above) for above in nodes]
        first = node.depth - len(nodes)
        request.window = WindowPages(
            first,
            pages,
            [*nodes],
            self._allocate(self._hand(request, node, surplus)),
            num_sent=first,
            num_read=node.depth * self.size.page_size,
            first_own=node.depth,
        )

    def reach(self, request: Request, end: int) -> int:
        """Set pages aside for the prompt's tokens up to `end`, none of which a step in flight may see; the position
        that they reach."""
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
        """The pages set aside for the prompt's tokens up to `end`: (first new index, page ids)."""
        held: WindowPages = request.window
        wanted = -(-end // self.size.page_size) - held.end
        if wanted > 0:
            held.append(held.spare[:wanted])
            del held.spare[:wanted]
        return held.unsent()

    def _reuse(self, held: WindowPages, first: int) -> None:
        """Keep the pages before index `first` for the rest of the prompt: the request's own, and those that it gave to
        the cache and that no other request uses. The cache loses these."""
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
        """`count` more pages for a request that decodes: (first new index, page ids)."""
        held: WindowPages = request.window
        held.append(self._allocate(count))
        return held.unsent()

    def _allocate(self, count: int) -> list[int]:
        if (missing := count - self.pool.num_free) > 0:
            self.index.evict(missing)
        return self.pool.allocate(count)

    # --- sharing and giving back

    def commit(self, request: Request, node: Node, depth: int) -> None:
        """Give the cache the windowed pages of the request's tokens between `depth` pages and `node`.

        A page that the cache has and that no request uses is replaced: it would be evicted first, and a prefix with a
        gap cannot be used.
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
        """The steps of the first `num_tokens` tokens have been read. Once the prompt is done, pages that no later
        token sees are given back; before, they are kept for the rest of the prompt, and for the prefix cache."""
        held: WindowPages = request.window
        held.num_read = num_tokens
        if request.prompt_done:
            first = self.size.first_needed(num_tokens)
            self.pool.free(self._drop(held, first))
            self.pool.free(held.spare)
            held.spare = []
            held.due = self.size.next_release(num_tokens)

    def _drop(self, held: WindowPages, first: int) -> list[int]:
        """Let go of the pages before index `first`; those that were the request's own."""
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
        """Take back all that a request holds."""
        held: WindowPages = request.window
        self.pool.free(self._drop(held, held.end))
        self.pool.free(held.spare)
        request.window = None

    # --- proof

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless free + cached + held is every page of the group, once."""
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
