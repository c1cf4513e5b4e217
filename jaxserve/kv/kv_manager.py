"""Allocates and frees the slots and KV pages of running requests. Contains no scheduling policy.

The `KVManager` owns the PagePool, the RadixCache and the free slots. `release` is the only place that returns a
request's slot and pages. It waits until the last step dispatched with the request has been read, because until then
the device may still write there.

    pages of a request     [0, cache_node.depth)      owned by the cache and locked, except duplicate_page_ids
                           [cache_node.depth, end)    owned by the request

If several engines share a server, `HeldPages` keeps prefixes in the cache until another engine has fetched them, and
`PageLog` reports to the router which pages enter and leave the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxserve.kv.groups.base import LayerGroup
from jaxserve.kv.groups.span_group import SpanGroup
from jaxserve.kv.groups.state_group import StateGroup
from jaxserve.kv.host_tier import HostTiers, StoredPrefix
from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node, RadixCache
from jaxserve.types.page_keys import PageEvents, next_key, root_key, token_bytes
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import FinishReason, PageMove, Request


class HeldPages:
    """Keeps the pages of the latest prefixes, at most `max_prefixes`, until they are fetched or their time is over."""

    def __init__(self, cache: RadixCache, max_prefixes: int = 64) -> None:
        self._cache = cache
        self._max_prefixes = max_prefixes
        self._held: list[tuple[Node, float]] = []  # with the seconds to hold, counted from the next `expire` on
        self._until: list[tuple[Node, float]] = []  # with the time at which the hold ends

    @property
    def nodes(self) -> list[Node]:
        """The last nodes of the prefixes held, each locked once."""
        return [node for node, _ in (*self._until, *self._held)]

    def hold(self, node: Node, seconds: float) -> None:
        """Keep the pages of the prefix of `node`, which must not be evicted before this call."""
        self._cache.lock(node)
        self._held.append((node, seconds))
        if len(self.nodes) > self._max_prefixes:
            self._cache.unlock((self._until or self._held).pop(0)[0])

    def give_up(self, node: Node) -> None:
        """End all holds of exactly this prefix. Each choice of a request has one."""
        for held in (self._until, self._held):
            for entry in [entry for entry in held if entry[0] is node]:
                held.remove(entry)
                self._cache.unlock(node)

    def clear(self) -> None:
        """End all holds."""
        for node in self.nodes:
            self._cache.unlock(node)
        self._until.clear()
        self._held.clear()

    def expire(self, now: float) -> None:
        """End the holds whose time is over. now: seconds"""
        if self._held or self._until:
            self._until += [(node, now + seconds) for node, seconds in self._held]
            self._held.clear()
            for entry in [entry for entry in self._until if entry[1] <= now]:
                self._until.remove(entry)
                self._cache.unlock(entry[0])


class PageLog:
    """The changes of the prefix cache since the last `take`. A page that came and left meanwhile is not reported."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}  # key -> whether the page was added

    def added(self, node: Node) -> None:
        """Record that the page of `node` is cached now. Its parent is cached or a root."""
        above = node.parent
        assert above is not None and not isinstance(node.key, str)
        if above.page_key is None:
            above.page_key = root_key(str(above.key))
        node.page_key = next_key(above.page_key, token_bytes(node.key))
        self._record(node.page_key, added=True)

    def removed(self, node: Node) -> None:
        """Record that the page of `node` is not cached any more."""
        assert node.page_key is not None
        self._record(node.page_key, added=False)

    def _record(self, key: bytes, *, added: bool) -> None:
        if self._changes.pop(key, added) is added:
            self._changes[key] = added

    def take(self) -> PageEvents | None:
        """Return the changes since the last call; None if there are none."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        keys: dict[bool, list[bytes]] = {True: [], False: []}
        for key, added in changes.items():
            keys[added].append(key)
        return PageEvents(b"".join(keys[True]), b"".join(keys[False]))


# Pages that waiting requests load in a step while others run: as many as one program copies, 128 MiB of Llama-3.1-8B.
MAX_LOADED = 64


class KVManager:
    """Slots and pages of one engine. With `prefix_cache` off the cache stays empty.

    groups: the layer groups from 1 on, in order; empty if all layers see all tokens
    host: copies of evicted pages; None if the server keeps none
    page_log: the pages that enter and leave the cache; None if the server has one engine

    Values per layer group are lists: group 0, which sees all tokens, first.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.page_size = config.page_size
        self.num_slots = config.num_slots
        self.groups = _groups(config)
        self.states = next((group for group in self.groups if isinstance(group, StateGroup)), None)
        self.pool = PagePool(config.num_pages)
        self.page_log = PageLog() if config.page_events else None
        on_added = None if self.page_log is None else self.page_log.added
        self.host = HostTiers(config, self.groups) if config.num_host_pages else None
        on_evicted = None if self.host is None else self.host.store
        self.cache = RadixCache(self.pool, config.page_size, self._on_removed(), on_evicted, on_added)
        self.held = HeldPages(self.cache)
        self._prefix_cache = config.prefix_cache
        self._slots = list(range(config.num_slots - 1, -1, -1))
        self._leaving: list[Request] = []  # ended or preempted; a step that contains them has not been read yet

    def _on_removed(self) -> Callable[[Node], None] | None:
        """Return the function to call with each node that leaves the cache."""
        calls = [group.cached.forget for group in self.groups]
        if self.page_log is not None:
            calls.append(self.page_log.removed)
        if len(calls) < 2:
            return calls[0] if calls else None

        def all_of_them(node: Node) -> None:
            for call in calls:
                call(node)

        return all_of_them

    # --- counting

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)

    @property
    def num_available(self) -> int:
        """Return the number of pages that `grow` could allocate now, in the layer group that has the fewest."""
        full = self.pool.num_free + self.cache.num_evictable
        for group in self.groups:
            full = min(full, group.num_growable)
        return full

    def growable(self) -> list[int]:
        """Return the number of pages by which running requests could grow now, of each layer group."""
        full = self.pool.num_free + self.cache.num_evictable
        return [full, *(group.num_growable for group in self.groups)]

    def available(self) -> list[int]:
        """Return the number of allocatable pages of each layer group."""
        full = self.pool.num_free + self.cache.num_evictable
        return [full, *(group.num_available for group in self.groups)]

    @property
    def has_leaving(self) -> bool:
        """Whether reading the steps in flight will free pages and slots."""
        return bool(self._leaving)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_reclaimable(self, request: Request) -> list[int]:
        """Return, for each layer group, the number of pages that releasing a running request makes available."""
        node: Node = request.cache_node
        own = len(request.page_ids) - node.depth + len(request.duplicate_page_ids)
        above: Node | None = node
        while above is not None and above.parent is not None and above.num_locks == 1:
            own += 1
            above = above.parent
        return [own, *(group.num_reclaimable(request) for group in self.groups)]

    # --- taking

    def match(self, request: Request) -> Node:
        """Return the node of the longest cached prefix of a waiting request. At least one token stays uncomputed."""
        assert request.slot is None, "its cache_node is in use"
        max_pages = self._max_cached_pages(request)
        tokens = request.prompt_keys
        if request.output_token_ids:
            tokens = tokens + request.output_token_ids
        node = self.cache.match_prefix(request.namespace, tokens, max_pages, request.cache_node)
        if self.states is not None:
            request.matched_node = node
        if self.groups:
            node = self.served(node)
        request.cache_node = node  # a hint, not locked
        return node

    def served(self, node: Node) -> Node:
        """Return the deepest node on the path to `node` whose prefix all groups can use."""
        while True:
            before = node
            for group in self.groups:
                node = group.cached.served(node)
            if node is before or len(self.groups) == 1:
                return node

    def num_usable(self, leader: Request, num_pages: int) -> int:
        """Return how many of the first `num_pages` pages of a running prompt others can use once it is computed."""
        for group in self.groups:
            num_pages = group.num_usable(leader, num_pages)
        return num_pages

    def _max_cached_pages(self, request: Request) -> int:
        bypass = request.reads_whole_prompt or not self._prefix_cache
        return 0 if bypass else (request.num_tokens - 1) // self.page_size

    def num_new_pages(self, request: Request, node: Node) -> list[int]:
        """Return, for each layer group, the number of available pages that `take` consumes.

        That is the fewest pages to allocate, plus the cached pages of the prefix that can no longer be evicted.
        """
        full = self.num_pages_for(request.num_tokens) - node.depth + self.cache.num_unlocked(node)
        return [full, *(group.num_new(request, node) for group in self.groups)]

    def take(self, request: Request, node: Node, surplus: Sequence[int] = ()) -> None:
        """Assign a slot and the pages of all its known tokens to a request. `node` is the result of a fresh `match`.

        Pages that follow it in the memory of the host are loaded, so request.cache_node can be deeper than `node`.
        surplus: for each of `groups`, pages beyond `num_new_pages` that no other request is expected to need; (): none
        """
        surplus = surplus or (0,) * len(self.groups)
        stored, surplus = self._to_load(request, node, surplus)
        node, total = stored.node, self.num_pages_for(request.num_tokens)
        self.cache.lock(node)
        held = self._hold(stored)
        pages = self.allocate(total - node.depth)  # may evict pages, and overwrite some of those that were found
        if stored.after:
            node = self._load(request, stored, pages)
            pages = pages[node.depth - total :]
        request.cache_node, request.num_loaded_ahead = node, 0
        request.slot = self._slots.pop()
        request.page_ids = node.page_ids + pages
        request.page_capacity = total * self.page_size
        request.num_read_tokens = node.depth * self.page_size
        for group, locked, spare in zip(self.groups, held, surplus, strict=True):
            locked += self._load_missing(group, node)
            group.take(request, node, spare)
            group.cached.unlock_all(locked)
        if self.groups and self.host is not None:
            self.host.keep(None)

    def _find_stored(self, request: Request, node: Node) -> StoredPrefix:
        """Return the longest prefix that can be loaded. `node` is the result of a fresh `match`."""
        num_pages = self._max_cached_pages(request)
        if self.host is None or num_pages <= node.depth:
            return StoredPrefix(node, [])
        if self.groups:  # the cache may have more pages, without those of the other groups
            tokens = request.page_tokens(0, num_pages * self.page_size)
            node = self.cache.match_prefix(request.namespace, tokens, num_pages, node)
        tokens = request.page_tokens(node.depth * self.page_size, num_pages * self.page_size)
        return self.host.find(node, tokens)

    def _to_load(self, request: Request, node: Node, surplus: Sequence[int]) -> tuple[StoredPrefix, Sequence[int]]:
        """Return the prefix that `take` uses, and the surplus that is left with it.

        The groups need pages for their loaded copies beside the pages of the prompt. If there are more of them than
        was planned, nothing is loaded.
        """
        stored = self._find_stored(request, node)
        if not self.groups or stored.depth == node.depth:
            return StoredPrefix(node, stored.after), surplus
        left = [
            group.num_new(request, node) + spare - group.num_new_with(request, stored.node, stored.depth)
            for group, spare in zip(self.groups, surplus, strict=True)
        ]
        return (stored, left) if min(left) >= 0 else (StoredPrefix(node, []), surplus)

    def _hold(self, stored: StoredPrefix) -> list[list[Node]]:
        """Protect the prefix from eviction, and its copies from being overwritten. Return the nodes that it locked.

        They are of each of `groups`.
        """
        if self.host is None or not self.groups:
            return [[] for _ in self.groups]
        self.host.keep(stored)
        return [group.cached.lock_prefix(stored.node, stored.depth) for group in self.groups]

    def _load_missing(self, group: LayerGroup, node: Node) -> list[Node]:
        """Load the pages of a group that the prefix `node` lacks. Return their nodes, whose pages are locked."""
        if self.host is None:
            return []
        nodes, pages = group.cached.add_missing(node)
        count = self.host.tiers[group.index].load([self.host.full.digest(above) for above in nodes], pages)
        assert count == len(nodes), "a copy that was kept is gone"
        return nodes

    def _load(self, request: Request, stored: StoredPrefix, page_ids: list[int]) -> Node:
        """Load stored pages to the first of `page_ids` and insert them into the cache. Return the new last node."""
        assert self.host is not None
        node = stored.node
        count = self.host.full.load(stored.after, page_ids)
        begin, end = node.depth * self.page_size, (node.depth + count) * self.page_size
        new, duplicates = self.cache.insert(node, request.page_tokens(begin, end), page_ids[:count], node.depth + count)
        assert not duplicates, "the match was not the longest"
        return new

    def load_ahead(self, request: Request, node: Node) -> bool:
        """If `take` would load too many pages for one step, load some of them. Return whether the request should wait.

        It then waits for a later step. `node` is the result of a fresh `match`, and there is room for the request. The
        pages are cached and not locked: the next `match` finds them unless they were evicted.
        """
        if self.host is None:
            return False
        stored = self._find_stored(request, node)
        node = stored.node
        if node.depth < request.num_loaded_ahead:  # some were evicted: load all at once
            return False
        self.cache.lock(node)
        most = max(0, MAX_LOADED - self.host.full.num_new_loads)
        waits = len(stored.after) > most
        if waits and most:
            pages = self.allocate(most)  # may overwrite some of those that were found
            first = node.depth
            node = self._load(request, stored, pages)
            self.pool.free(pages[node.depth - first :])
            waits = node.depth > first
            request.num_loaded_ahead = node.depth
        self.cache.unlock(node)
        return waits

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages and evict cached pages if needed. Raises ValueError if fewer are available."""
        if (missing := count - self.pool.num_free) > 0:
            self.cache.evict(missing)
        return self.pool.allocate(count)

    def grow(self, request: Request, count: int) -> list[int]:
        """Allocate `count` more pages for a running request."""
        pages = self.allocate(count)
        request.page_ids += pages
        request.page_capacity += count * self.page_size
        return pages

    def prompt_reach(self, request: Request, end: int) -> int:
        """Return the position, at most `end`, up to which a running prompt has pages now.

        The groups reuse pages of a prompt as its steps are read.
        """
        for group in self.groups:
            end = group.reach(request, end)
        return end

    # --- sharing and giving back

    def commit(self, request: Request, num_tokens: int) -> None:
        """Insert the full pages of the first `num_tokens` tokens into the cache. They must have been computed and read.

        Cost: proportional to the number of pages that were not inserted before.
        """
        num_pages, start = num_tokens // self.page_size, request.cache_node
        if self._prefix_cache and num_pages > start.depth:
            tokens = request.page_tokens(start.depth * self.page_size, num_pages * self.page_size)
            pages = request.page_ids[start.depth : num_pages]
            request.cache_node, duplicates = self.cache.insert(start, tokens, pages, num_pages)
            request.duplicate_page_ids += duplicates
        if self._prefix_cache:
            for group in self.groups:
                group.commit(request, request.cache_node, start.depth, num_tokens)

    def merge_duplicates(self, requests: Iterable[Request]) -> None:
        """Free pages that exist twice: as the request's own and as a cached copy that no other request uses."""
        for request in requests:
            if request.duplicate_page_ids:
                request.duplicate_page_ids = self.cache.merge_duplicates(
                    request.cache_node, request.page_ids, request.duplicate_page_ids
                )

    def release(self, request: Request, last_step_read: int) -> None:
        """Free all that a request holds: now, or in `retire` if a step that contains it has not been read."""
        if request.last_step > last_step_read:
            self._leaving.append(request)
        else:
            self._give_back(request)

    def retire(self, step: int) -> None:
        """Record that `step` and all steps before it have been read, and free the requests that waited for that."""
        if self._leaving:
            gone = [request for request in self._leaving if request.last_step <= step]
            self._leaving = [request for request in self._leaving if request.last_step > step]
            for request in gone:
                self._give_back(request)

    def _give_back(self, request: Request) -> None:
        assert request.slot is not None
        if request.prompt_done:
            self.commit(request, request.num_tokens - 1)
        node: Node = request.cache_node
        self.pool.free(request.duplicate_page_ids)
        self.pool.free(request.page_ids[node.depth :])
        for group in self.groups:
            group.release(request)
        if request.hold_seconds > 0 and request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            self.held.hold(node, request.hold_seconds)
        self.cache.unlock(node)
        self._slots.append(request.slot)
        request.slot, request.page_ids, request.duplicate_page_ids = None, [], []
        request.page_capacity = 0

    def adopt(self, namespace: str, token_ids: list[int], most: int | None = None) -> tuple[int, list[int]]:
        """Cache the full pages of `token_ids`, as far as there is room. The caller writes their content before a step.

        most: largest number of new pages; None: no limit. Returns the number of first pages that were cached already,
        and the ids of the new pages.
        """
        if not self._prefix_cache:
            return 0, []
        num_pages = len(token_ids) // self.page_size
        node = self.cache.match_prefix(namespace, token_ids, num_pages)
        self.cache.lock(node)
        first = node.depth
        wanted = num_pages - first if most is None else min(most, num_pages - first)
        page_ids = self.allocate(min(wanted, self.pool.num_free + self.cache.num_evictable))
        end = first + len(page_ids)
        new_tokens = token_ids[first * self.page_size : end * self.page_size]
        node, duplicates = self.cache.insert(node, new_tokens, page_ids, end)
        assert not duplicates, "the match was not the longest"
        self.cache.unlock(node)
        return first, page_ids

    def discard(self, request: Request) -> None:
        """Remove a running request's pages from the cache, because their content is not finite."""
        request.prompt_done = False
        if self.host is not None:
            self.host.drop(request.cache_node)
        self.cache.discard(request.cache_node)

    def flush(self, *, new_weights: bool = False) -> None:
        """Remove all cached prefixes. Pages in use are freed when their requests unlock them.

        new_weights: later pages must not be found by a process with the weights of the start.
        """
        self.held.clear()  # no other engine can fetch these pages any more
        self.cache.flush()
        if self.host is not None:
            self.host.clear(new_weights=new_weights)

    def recover(self) -> None:
        """Remove all cached prefixes, because the content of all pages is lost."""
        self.held.clear()
        self.cache.flush()
        if self.host is not None:
            self.host.recover()

    def take_page_moves(self) -> list[PageMove]:
        """Return the pages to copy between device and host before the next step."""
        return [] if self.host is None else self.host.take_moves()

    def page_counts(self) -> dict[str, Any]:
        """Return the gauges of the pages, by their names in SchedulerStats."""
        config, num_free, host = self._config, self.pool.num_free, self.host
        return {
            "num_pages": config.num_pages,
            "num_pages_free": num_free,
            "num_pages_cached": self.cache.num_pages,
            "num_pages_evictable": self.cache.num_evictable,
            "num_pages_held": config.num_pages - num_free - self.cache.num_pages,
            "num_host_pages_used": 0 if host is None else host.full.num_pages,
            "num_host_pages_stored": 0 if host is None else host.full.num_stored,
            "num_host_pages_loaded": 0 if host is None else host.full.num_loaded,
            "group_pages_used": [g.num_pages - g.num_available for g in self.groups if g is not self.states],
            "num_state_pages_used": 0 if self.states is None else self.states.num_pages - self.states.num_available,
            "num_state_pages_cached": 0 if self.states is None else self.states.cached.num_pages,
        }

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise AssertionError unless every page is exactly once free, cached or held, and likewise for slots."""
        holders = [*running, *self._leaving]
        owned = self.cache.check_integrity([request.cache_node for request in holders] + self.held.nodes)
        for request in holders:
            node: Node = request.cache_node
            shared = set(node.page_ids)
            own = [page for page in request.page_ids if page not in shared]
            assert sorted(own) == sorted(request.duplicate_page_ids + request.page_ids[node.depth :])
            assert request.page_capacity == len(request.page_ids) * self.page_size
            owned += own
        self.pool.check_integrity(owned)
        for group in self.groups:
            group.check_integrity(holders)
        assert all(set(request.holdings) == {group.index for group in self.groups} for request in holders)
        if self.host is not None:
            self.host.check_integrity()
        slots = [request.slot for request in holders] + self._slots
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or has two owners"  # type: ignore[type-var]


def _groups(config: SchedulerConfig) -> tuple[LayerGroup, ...]:
    pairs = zip(config.groups, config.spans, strict=True)
    groups: list[LayerGroup] = [
        SpanGroup(index, group.num_pages, span, config.max_sequence_tokens)
        for index, (group, span) in enumerate(pairs, start=1)
    ]
    if config.states is not None:
        sizes, index = (config.states, config.page_size, config.num_slots), 1 + len(groups)
        budget, keeps = config.prefill_budget, config.prefix_cache
        groups.append(StateGroup(index, *sizes, prompt_tokens=budget, max_drafts=config.max_drafts, keeps=keeps))
    return tuple(groups)
