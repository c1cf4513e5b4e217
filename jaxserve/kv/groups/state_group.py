"""The pages of recurrent states: the states of running requests, and the states that the prefix cache keeps. No jax.

A layer with a recurrent state summarises all tokens so far, so a page of this group is one whole state: of all such
layers, after some number of tokens. A request owns one page, its state, and needs no other as it grows. The prefix
cache keeps states at some borders of pages. A prefix is usable only if the state after its last token was kept
(`served`).

    pages of group 0    | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |
    states kept                 *               *           a request with 7 of these pages computes tokens from page 3

The device has for each slot a page to read and a page to write (STATE_COLUMNS of `types.scheduling`). The first step of
a request reads the cached state and writes the request's own page: a copy on write without a copy. That program then
makes the page that it wrote the one to read.

The device's state lags one token behind, because a row's last token may be computed again (`ops/state/base.py`). A row
[start, end) folds the tokens before end - 1, so it can keep the state after any number of tokens up to that. The host
lists positions with pages. Such a page belongs to the request (`pending`) until the row that writes it was read and is
finite. Then `commit` gives it to the node of that depth.

A step reads the cached page, so it stays locked until the first step was read: another row of the same step must not
write there.

Which states are kept, at multiples of `border`:

    last border   of a prompt: the last one before its end, for siblings, retries and the next turn
    junction      of a prompt: the last one up to which pages were found, but no state. An earlier request had other
                  tokens after it, and so may the next one (Marconi, https://arxiv.org/abs/2411.19379)
    intervals     of a prompt: multiples of `interval`; of a larger one, if a step computes more of them than it can
                  keep. The second prompt with the same beginning computes at most as much of it again
    output        the last multiple of `interval`; of `border`, if there was no page for the prompt's last border. Its
                  page may be the least recently used cached one, because the newest conversation is likelier to go on
                  than the oldest (`_num_spared`)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxserve.kv.groups.cached_pages import CachedPages
from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node
from jaxserve.types.scheduling import STATE_EMITS, STATE_HEAD, StateSizes
from jaxserve.types.step import Request, TableUpdate

_NEVER = 2**62
_Kept = tuple[int, int]  # number of tokens, page


@dataclass(slots=True, eq=False)
class StatePages:
    """The states of one request.

    own: page that the device writes. begin: tokens of the cached state that it began with; 0: it began with none
    read: node of that state while it is locked; None: it is not locked, or there was none
    plan: positions at which the prompt's state is to be kept, the most useful first
    missed: the first of them had no page, or has not had one yet
    entries: the states to keep in the device's table. pending: kept states that `commit` has not given to the cache, by
    position; of the output the last one that was written, and at most one after it
    """

    own: int
    begin: int
    read: Node | None
    plan: list[int]
    missed: bool
    entries: list[_Kept | None] = field(default_factory=lambda: [None] * STATE_EMITS)
    pending: list[_Kept] = field(default_factory=list)
    is_new: bool = True  # the device has no entries of it yet
    due: int = _NEVER


def _is_of_output(request: Request, position: int) -> bool:
    """Return whether a decode row writes the state at `position`, and not a chunk of the prompt."""
    return position >= request.num_prefill_tokens


class StateGroup:
    """Gives requests their state pages and takes them back. Implements LayerGroup.

    index: of the group, the last one. page_size: tokens of a page of group 0. prompt_tokens: at most, of a step.
    max_drafts: of a row. keeps: there is a prefix cache
    """

    def __init__(
        self,
        index: int,
        sizes: StateSizes,
        page_size: int,
        num_slots: int,
        *,
        prompt_tokens: int,
        max_drafts: int = 0,
        keeps: bool,
    ) -> None:
        self.index = index
        self.num_pages = sizes.num_pages
        self.pool = PagePool(sizes.num_pages)
        self.cached = CachedPages(self.pool, lambda num_pages: max(0, num_pages - 1))  # the last one
        self._sizes = sizes
        self._page_size = page_size
        self._idle_slots = num_slots
        self._prompt_tokens = prompt_tokens
        self._max_drafts = max_drafts
        self._keeps = keeps
        # One long prompt must not evict the states of all others.
        self._most_planned = max(2, sizes.num_pages // 4)

    # --- counting

    @property
    def num_available(self) -> int:
        return self.cached.num_available

    @property
    def num_growable(self) -> int:
        return _NEVER  # a request does not grow

    @property
    def _num_spared(self) -> int:
        """Return how many available pages the states of outputs leave: one for each idle slot, one to lock for a hit.

        At most half of all, because the memory may hold fewer states than there are slots.
        """
        return min(self._idle_slots + min(self._idle_slots, 1), self.num_pages // 2)

    def num_reclaimable(self, request: Request) -> int:
        """Return the number of pages that releasing a running request makes available."""
        held: StatePages = request.holdings[self.index]
        return 1 + len(held.pending) + (held.read is not None and self.cached.is_last_user(held.read))

    def num_new(self, request: Request, node: Node) -> int:
        """Return the number of available pages that `take` consumes: its own, and the cached one that it locks."""
        return 1 + self.cached.num_idle(self.cached.path(node))

    def num_new_with(self, request: Request, node: Node, depth: int) -> int:
        """Return the number of available pages that `take` consumes at depth `depth`, if its state is loaded."""
        return 1 + (self.cached.num_idle([node]) if node.depth == depth and node in self.cached else 1)

    def num_to_grow(self, request: Request, node: Node) -> int:
        return 0

    # --- the prefix cache

    def num_usable(self, leader: Request, num_pages: int) -> int:
        """Return at which depth up to `num_pages` a running prompt keeps its deepest state."""
        held: StatePages | None = leader.holdings.get(self.index)
        if held is None:
            return 0
        kept = [position for position in held.plan if position <= num_pages * self._page_size]
        return max(kept, default=0) // self._page_size

    # --- a running request

    def take(self, request: Request, node: Node, surplus: int) -> None:
        """Lock the state of the prefix `node`, allocate the request's own page, and plan which states to keep."""
        read = node if node.depth else None
        if read is not None:
            self.cached.lock(read)
        begin = node.depth * self._page_size
        own, plan = self.cached.allocate(1)[0], self._plan(request, begin)
        request.holdings[self.index] = StatePages(own, begin, read, plan, bool(plan))
        self._idle_slots -= 1

    def _plan(self, request: Request, begin: int) -> list[int]:
        if not self._keeps:
            return []
        border, interval = self._sizes.border, self._sizes.interval
        last = (request.num_tokens - 1) // border * border
        # With more multiples than places, a chunk would keep its last few, and no state of its beginning.
        chunk = min(self._prompt_tokens, request.num_tokens - begin)
        every = -(-chunk // (STATE_EMITS * interval)) * interval
        matched: Node = request.matched_node
        junction = matched.depth * self._page_size // border * border
        regular = range(last // every * every, begin, -every)[: self._most_planned]
        return [position for position in dict.fromkeys((last, junction, *regular)) if position > begin]

    def reach(self, request: Request, end: int) -> int:
        return end

    def cover(self, request: Request, start: int, end: int) -> TableUpdate | None:
        """List the states to keep that a chunk [start, end) of the prompt computes. Returns the new table entries.

        An entry that no earlier chunk has reached stays: a chunk may be shortened after it was covered.
        """
        held: StatePages = request.holdings[self.index]
        open_places = [i for i, entry in enumerate(held.entries) if entry is None or entry[0] < start]
        listed = {entry[0] for entry in held.entries if entry is not None}
        changed = held.is_new
        for position in held.plan:
            if not open_places:
                break
            if start <= position < end and position not in listed and self.num_available:
                kept = held.entries[open_places.pop(0)] = position, self.cached.allocate(1)[0]
                insort(held.pending, kept)
                held.missed = held.missed and position != held.plan[0]
                changed = True
        if not changed:
            return None
        state = []
        if held.is_new:
            read = self.num_pages if held.read is None else self.cached.page_of(held.read)
            state, held.is_new = [read, held.own, held.begin], False
        return self._update(request, STATE_HEAD - len(state), [*state, *self._listed(held)])

    def _listed(self, held: StatePages) -> list[int]:
        return [number for entry in held.entries for number in (entry or (0, self.num_pages))]

    def _update(self, request: Request, first: int, values: list[int]) -> TableUpdate:
        assert request.slot is not None
        return TableUpdate(request.slot, self.index, first, values)

    def grow(self, request: Request, count: int) -> TableUpdate | None:
        """Keep the state at the last multiple of the interval in the `count` new pages of a request, if there is one.

        With drafts a row may end before that position, and a later one writes the state. Returns the table entries.
        """
        held: StatePages = request.holdings[self.index]
        every = self._sizes.border if held.missed else self._sizes.interval
        position = (request.page_capacity - 1) // every * every
        if not self._keeps or position < request.page_capacity - count * self._page_size:
            return None
        last = held.pending[-1] if held.pending and _is_of_output(request, held.pending[-1][0]) else None
        read = request.num_computed_tokens - request.num_inflight_tokens
        if last is not None and not self._is_written(request, last[0], read):
            return None
        if self.num_available > self._num_spared:
            page = self.cached.allocate(1)[0]
        elif last is not None:
            page = held.pending.pop()[1]  # nothing is kept if the request ends before the new state is written
        else:
            return None
        held.entries = [(position, page)] + [None] * (STATE_EMITS - 1)
        held.pending.append((position, page))
        held.missed = False
        held.due = position + 1 + self._max_drafts
        return self._update(request, STATE_HEAD, self._listed(held))

    def _is_written(self, request: Request, position: int, num_tokens: int) -> bool:
        """Return whether the rows of the first `num_tokens` tokens, which were read, have surely written that state.

        A row does not fold its last token, nor its drafts: the state needs a row that begins at `position`, or a chunk
        that ends behind it.
        """
        return position < num_tokens - (self._max_drafts if _is_of_output(request, position) else 0)

    # --- sharing and giving back

    def commit(self, request: Request, node: Node, depth: int, num_tokens: int) -> None:
        """Give the cache the states that the rows of the first `num_tokens` tokens have written.

        node: of the last page that the cache has of the request. depth: not needed, as `pending` has the positions
        """
        held: StatePages = request.holdings[self.index]
        self._unlock(held)
        left, taken, above = [], list[Node](), node
        for position, page in reversed(held.pending):
            while above.depth * self._page_size > position and above.parent is not None:
                above = above.parent
            if not self._is_written(request, position, num_tokens) or not above.alive:
                left.append((position, page))
            elif above in self.cached:
                self.pool.free((page,))
            else:
                self.cached.put(above, page)
                taken.append(above)
        self.cached.unlock_all(reversed(taken))  # the deepest, with which the next turn begins, is evicted last
        held.pending = left[::-1]

    def _unlock(self, held: StatePages) -> None:
        if held.read is not None:
            self.cached.unlock(held.read)
            held.read = None

    def advance(self, request: Request, num_tokens: int) -> None:
        """Free the kept states of the output before the last one that was written."""
        held: StatePages = request.holdings[self.index]
        written = [kept for kept in held.pending if self._is_written(request, kept[0], num_tokens)]
        self.pool.free(page for _, page in written[:-1])
        held.pending = held.pending[max(0, len(written) - 1) :]
        held.due = _NEVER

    def release(self, request: Request) -> None:
        """Free all that a request holds."""
        held: StatePages = request.holdings[self.index]
        self._unlock(held)
        self.pool.free((held.own, *(page for _, page in held.pending)))
        self._idle_slots += 1
        del request.holdings[self.index]

    # --- consistency checks

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every page of the pool is exactly once free, cached or held."""
        owned, locked, reclaimable = [], list[Node](), 0
        for request in holders:
            held: StatePages = request.holdings[self.index]
            owned += [held.own, *(page for _, page in held.pending)]
            positions = [held.begin, *(position for position, _ in held.pending)]
            assert positions == sorted(set(positions)), "kept states out of order, or one of them twice"
            assert sum(_is_of_output(request, position) for position in positions[1:]) <= 2, "too many of the output"
            locked += [] if held.read is None else [held.read]
            reclaimable += self.num_reclaimable(request)
        self.pool.check_integrity(owned + self.cached.check_integrity(locked))
        shared = sum(locked.count(node) > 1 for node in set(locked))
        assert self.num_available + reclaimable + shared == self.num_pages, "a release gives another number of pages"
