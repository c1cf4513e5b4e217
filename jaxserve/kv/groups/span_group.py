"""The pages of layers whose tokens see a window or a chunk, in running requests and in the prefix cache. No jax.

The layers of each reach have their own pool and page tables, with the indices of the pages of full attention. A
request holds the pages that a future token, or a token of a step in flight, can see. It releases older pages as its
steps are read (`SpanGroup`). The range that a token sees is called its window here, also if it is a chunk:

    index   0 ............... first ..................... first + len(pages)
            |  released       |  cached, locked       | own  |

All pages that a prompt needs are allocated at admission, so a started prompt never waits for pages of this pool.
They cover two chunks and a window if enough pages are free, else at least two windows (`spare`: allocated, not yet
in the page table). A longer prompt reuses its own pages that fell out of the window. A prompt that fits keeps all
its pages for the prefix cache.

A prefix is usable only if the prefix cache has all pages of the last window before its end (`CachedPages`). Requests
lock only the window pages that they see.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.kv.groups.cached_pages import CachedPages
from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node
from jaxserve.types.scheduling import Span
from jaxserve.types.step import Request, TableUpdate


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

    def take_unsent(self) -> tuple[int, list[int]]:
        """Return the table entries that the device does not have, as first index and ids, and count them as sent."""
        first, self.num_sent = self.num_sent, self.end
        return first, self.pages[first - self.first :]


class SpanGroup:
    """Gives requests their window pages and takes them back. Implements LayerGroup.

    index: of the group. num_pages: size of the pool. longest: tokens of the longest sequence.
    """

    def __init__(self, index: int, num_pages: int, span: Span, longest: int) -> None:
        self.index = index
        self.num_pages = num_pages
        self.span = span
        self.pool = PagePool(num_pages)
        self.cached = CachedPages(self.pool, span.first_of_prefix)
        # The prefix's last window is locked for the first tokens, so the prompt's own pages need room beside it.
        room = num_pages - span.decoding
        self._max_reserved = min(span.prefilling, room) if room >= span.decoding else num_pages
        # Two windows serve chunks of half a window. More is allocated only if it is free (`surplus`): two whole chunks
        # can need 16 windows, and waiting for these can take long.
        self._min_reserved = min(self._max_reserved, 2 * span.decoding)
        assert num_pages >= span.least(longest)

    # --- counting

    @property
    def num_available(self) -> int:
        """Return the number of pages that `grow` could allocate now."""
        return self.cached.num_available

    @property
    def num_growable(self) -> int:
        return self.num_available

    def num_reclaimable(self, request: Request) -> int:
        """Return the number of pages that releasing a running request makes available."""
        held: WindowPages = request.holdings[self.index]
        return len(held.spare) + sum(node is None or self.cached.is_last_user(node) for node in held.nodes)

    def num_new(self, request: Request, node: Node) -> int:
        """Return the number of available pages that `take` consumes.

        That is the fewest pages to allocate, plus the pages of the prefix to lock.
        """
        return self._num_reserved(request, node.depth) + self.cached.num_idle(self.cached.path(node))

    def num_new_with(self, request: Request, node: Node, depth: int) -> int:
        """Return the number of available pages that `take` consumes at depth `depth`, if the missing pages are loaded.

        node: the deepest cached node on the way there
        """
        first = self.span.first_of_prefix(depth)
        held = [above for above in self.cached.path_from(node, first) if above in self.cached]
        to_load = depth - first - len(held)
        return self._num_reserved(request, depth) + to_load + self.cached.num_idle(held)

    def num_to_grow(self, request: Request, node: Node) -> int:
        """Return how many more pages a request needs at most while it decodes.

        Pages that it holds, or would take over from the prefix at `node`, are subtracted.
        """
        held: WindowPages | None = request.holdings.get(self.index)
        if held is not None:
            return max(0, self.span.decoding - len(held.pages) - len(held.spare))
        return max(0, self.span.decoding - self._num_reserved(request, node.depth) - len(self.cached.path(node)))

    def _num_reserved(self, request: Request, depth: int, surplus: int = 0) -> int:
        """Return how many pages `take` allocates for the prompt's tokens after a prefix of `depth` pages."""
        most = min(self._max_reserved, self._min_reserved + surplus)
        return min(-(-request.num_tokens // self.span.page_size) - depth, most)

    # --- the prefix cache

    def num_usable(self, leader: Request, num_pages: int) -> int:
        return num_pages

    # --- taking

    def take(self, request: Request, node: Node, surplus: int) -> None:
        """Lock the last window of the prefix `node` and allocate pages for the tokens after it.

        surplus: available pages beyond `num_new`; the prompt gets as many of them as it can use
        """
        nodes = self.cached.path(node)
        pages = [self.cached.lock(above) for above in nodes]
        first = node.depth - len(nodes)
        request.holdings[self.index] = WindowPages(
            first,
            pages,
            [*nodes],
            self.cached.allocate(self._num_reserved(request, node.depth, surplus)),
            num_sent=first,
            num_read=node.depth * self.span.page_size,
            first_own=node.depth,
        )

    def reach(self, request: Request, end: int) -> int:
        """Make pages available for the prompt's tokens up to `end`. Return the position that the pages cover.

        A page that a step in flight can see is not touched.
        """
        held: WindowPages = request.holdings[self.index]
        wanted = -(-end // self.span.page_size) - held.end
        if wanted > len(held.spare):
            self._reuse(held, self.span.first_needed(held.num_read))
        lost = min(wanted - len(held.spare), held.num_lost, self.num_available)
        if lost > 0:
            held.spare += self.cached.allocate(lost)
            held.num_lost -= lost
        return min(end, (held.end + len(held.spare)) * self.span.page_size)

    def cover(self, request: Request, start: int, end: int) -> TableUpdate | None:
        """Enter the reserved pages of the prompt's tokens up to `end`. Returns the new table entries."""
        held: WindowPages = request.holdings[self.index]
        wanted = -(-end // self.span.page_size) - held.end
        if wanted > 0:
            held.append(held.spare[:wanted])
            del held.spare[:wanted]
        return self._update(request, held)

    def _reuse(self, held: WindowPages, first: int) -> None:
        """Remove the pages before index `first` from the request.

        A page that only this request uses becomes a `spare` page for the rest of its prompt; if the cache has it, the
        cache loses it. A page that other requests use stays in the cache and is counted in `num_lost`.
        """
        for index in range(max(held.first, held.first_own), min(held.end, first)):
            node = held.nodes[index - held.first]
            if node is None:
                continue
            if self.cached.is_last_user(node):
                self.cached.take_back(node)
                held.nodes[index - held.first] = None
            else:
                held.num_lost += 1
        held.spare += self._drop(held, first)

    def grow(self, request: Request, count: int) -> TableUpdate | None:
        """Allocate `count` pages for a decoding request. Returns the new table entries."""
        held: WindowPages = request.holdings[self.index]
        held.append(self.cached.allocate(count))
        return self._update(request, held)

    def _update(self, request: Request, held: WindowPages) -> TableUpdate | None:
        first, page_ids = held.take_unsent()
        assert request.slot is not None
        return TableUpdate(request.slot, self.index, first, page_ids) if page_ids else None

    # --- sharing and giving back

    def commit(self, request: Request, node: Node, depth: int, num_tokens: int) -> None:
        """Give the cache the window pages of the request's tokens between depth `depth` and `node`.

        Also replace unlocked cached pages by this request's: they would be evicted first, and a prefix with a gap
        cannot be matched.
        """
        held: WindowPages = request.holdings[self.index]
        while node.depth > max(held.first, depth):
            i = node.depth - 1 - held.first
            if i < len(held.pages) and held.nodes[i] is None and node.alive and not self.cached.in_use(node):
                self.cached.put(node, held.pages[i])
                held.nodes[i] = node
            assert node.parent is not None
            node = node.parent

    def advance(self, request: Request, num_tokens: int) -> None:
        """Record that the steps of the first `num_tokens` tokens have been read.

        After the prompt, pages that no later token sees are freed. During the prompt they are kept, for its own
        later chunks and for the prefix cache.
        """
        held: WindowPages = request.holdings[self.index]
        held.num_read = num_tokens
        if request.prompt_done:
            first = self.span.first_needed(num_tokens)
            self.pool.free(self._drop(held, first))
            self.pool.free(held.spare)
            held.spare = []
            held.due = self.span.next_release(num_tokens)

    def _drop(self, held: WindowPages, first: int) -> list[int]:
        """Remove the pages before index `first` from the request. Returns those that the request owned."""
        count = max(0, first - held.first)
        own = []
        for page, node in zip(held.pages[:count], held.nodes[:count], strict=True):
            if node is None:
                own.append(page)
            else:
                self.cached.unlock(node)
        del held.pages[:count], held.nodes[:count]
        held.first += count
        return own

    def release(self, request: Request) -> None:
        """Free all that a request holds."""
        held: WindowPages = request.holdings[self.index]
        self.pool.free(self._drop(held, held.end))
        self.pool.free(held.spare)
        del request.holdings[self.index]

    # --- consistency checks

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every page of the pool is exactly once free, cached or held."""
        owned, locked = [], []
        for request in holders:
            held: WindowPages = request.holdings[self.index]
            assert len(held.pages) == len(held.nodes)
            owned += held.spare
            for i, (page, node) in enumerate(zip(held.pages, held.nodes, strict=True), start=held.first + 1):
                if node is None:
                    owned.append(page)
                else:
                    assert node.depth == i, "a windowed page at another place than in the cache"
                    locked.append(node)
        self.pool.check_integrity(owned + self.cached.check_integrity(locked))
