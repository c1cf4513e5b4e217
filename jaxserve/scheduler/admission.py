"""Estimates for admission: tokens that running requests will still need, room for one more, prefills worth waiting for.

Pure arithmetic over Requests and what they hold. Changes no request and allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxserve.kv.kv_manager import KVManager
from jaxserve.kv.radix_cache import Node
from jaxserve.types.step import Request

CLIP_NEW_TOKENS = 4096  # reserve no more of a larger max_tokens, because few outputs are that long
FLOOR_FACTOR = 0.14  # lower bound of the ratio, as a share of its start value
DECAY_STEPS = 600  # decode steps from the start value to the floor
MAX_STALL = 16  # steps; do not wait for a prefill that was in none of the last MAX_STALL steps
MARGIN_STEPS = 20  # decode steps without another preemption that one preemption should buy


_Key = tuple[Node, tuple[int, ...]]


class NewTokenRatio:
    """The share of its remaining max_tokens that a request is expected to generate.

    Decays with each decode step and rises to the observed share when pages run out. The scheme and its constants are
    those of SGLang's scheduler: a low value means more requests at once, a high value means fewer preemptions.
    """

    def __init__(self, start: float) -> None:
        self.value = start
        self._start = start
        self._floor = start * FLOOR_FACTOR
        self._decay = (start - self._floor) / DECAY_STEPS

    def decay(self) -> None:
        self.value = max(self._floor, self.value - self._decay)

    def reset(self) -> None:
        self.value = self._start

    def rise(self, kept: Iterable[Request]) -> None:
        """Raise the ratio after pages ran out. `kept`: the requests that keep running."""
        decoded = total = 0
        for request in kept:
            decoded += len(request.output_token_ids) + MARGIN_STEPS
            total += request.max_tokens
        self.value = min(1.0, max(self.value, decoded / (total + 1)))

    def reserve(self, requests: Iterable[Request]) -> int:
        """Return the number of tokens that these requests are expected to generate from now on.

        A request that no stop token can end counts with all its remaining tokens.
        """
        certain = likely = 0
        for request in requests:
            left = request.max_tokens - len(request.output_token_ids)
            if not request.stop_token_ids:
                certain += left
            else:
                likely += left if left < CLIP_NEW_TOKENS else CLIP_NEW_TOKENS
        return certain + math.ceil(likely * self.value)


class Room:
    """Token counts per layer group, full attention first: what running requests will take, and what is missing."""

    def __init__(self, ratio: NewTokenRatio, kv: KVManager) -> None:
        self.ratio = ratio
        self.kv = kv

    def reserve(self, requests: Iterable[Request]) -> list[int]:
        """Return the tokens by which requests are expected to grow. In the sliding-window group growth ends at the
        window.
        """
        reserved = [self.ratio.reserve(requests)]
        if (window := self.kv.window) is not None:
            size = self.kv.page_size
            growth = [(request, window.num_to_grow(request, request.cache_node) * size) for request in requests]
            reserved.append(sum(min(self.ratio.reserve((request,)), room) for request, room in growth if room))
        return reserved

    def missing(self, request: Request, node: Node, reserved: list[int], *, alone: bool) -> list[int]:
        """Return the token deficit of each layer group if this request were admitted on top of `reserved`.

        A negative value means that much is free. If no other request runs, no reserve for growth is needed.
        """
        pairs = zip(self.kv.available(), self.kv.num_new_pages(request, node), strict=True)
        room = [(available - new) * self.kv.page_size for available, new in pairs]
        if min(room) >= 0 and alone:
            return [-there for there in room]
        groups = zip(reserved, self.reserve((request,)), room, strict=True)
        return [others + own - there for others, own, there in groups]


class PrefillsInProgress:
    """Prompts being computed whose pages a waiting request could soon share, as the siblings of one n > 1 request do.

    A prompt is found by the pages that follow its cached ones: the key is (cache_node, the next page's tokens).
    Siblings are found by the id of the request that they belong to.
    """

    def __init__(self, page_size: int, prefix_cache: bool) -> None:
        self._page_size = page_size
        self._prefix_cache = prefix_cache
        self._leaders: dict[_Key, Request] = {}
        self._keys: dict[Request, _Key | None] = {}
        self._started: dict[Request, int] = {}  # step in which a request started
        self._siblings: dict[str, Request] = {}  # by group id: the last sibling that started
        self._by_id: dict[str, Request] = {}

    def add(self, request: Request, step: int) -> None:
        """Add a request that starts in this step."""
        if self._prefix_cache:
            self._started[request] = step
            self._siblings[request.group] = request
            self._by_id[request.request_id] = request
            self._register(request)

    def advance(self, request: Request) -> None:
        """Update a prompt after more of its pages were cached."""
        if request in self._started:
            self._unregister(request)
            self._register(request)

    def remove(self, request: Request) -> None:
        """Remove a prompt: all its pages are cached, or they never will be."""
        if self._started.pop(request, None) is not None:
            self._unregister(request)
            self._by_id.pop(request.request_id, None)
            if self._siblings.get(request.group) is request:
                del self._siblings[request.group]

    def _register(self, request: Request) -> None:
        key = self._keys[request] = self._key(request, request.cache_node)
        if key is not None:
            self._leaders[key] = request

    def _unregister(self, request: Request) -> None:
        key = self._keys.pop(request)
        if key is not None and self._leaders.get(key) is request:
            del self._leaders[key]

    def awaits_prefill(self, request: Request, step: int) -> bool:
        """Return whether it is worth waiting for the prefill of a sibling, or of one compared with it before.

        Does not read the prompt. A sibling is also the hint for the request's next match in the prefix cache.
        """
        sibling = self._siblings.get(request.group) if request.group else None
        if sibling is not None and sibling.prompt_token_ids is request.prompt_token_ids:
            node = sibling.cache_node
            # Of a sibling that is computed again, the deeper pages are of its output, which is not this request's.
            if request.slot is None and node.depth * self._page_size <= len(request.prompt_token_ids):
                request.cache_node = node
            return self._is_worth(request, sibling, node.depth, step)
        known = self._by_id.get(request.shared_with[0]) if request.shared_with else None
        return known is not None and self._is_worth(request, known, known.cache_node.depth, step)

    def worth_waiting(self, request: Request, node: Node, step: int) -> bool:
        """Return whether a prefill in progress saves `request` at least half the tokens that it still has to compute.

        The request waits only until the pages that both prompts share are computed.
        """
        key = self._key(request, node) if self._leaders else None
        leader = self._leaders.get(key) if key else None
        return leader is not None and self._is_worth(request, leader, node.depth, step)

    def _is_worth(self, request: Request, leader: Request, depth: int, step: int) -> bool:
        """depth: number of cached pages that both prompts share"""
        if request.reads_whole_prompt or leader.priority > request.priority:
            return False  # a leader of worse priority may itself be waiting for this request
        if max(leader.last_step, self._started[leader]) < step - MAX_STALL:
            return False
        gain = (self._num_shared(request, leader, depth) - depth) * self._page_size
        return gain > 0 and 2 * gain >= request.num_tokens - depth * self._page_size

    def _key(self, request: Request, node: Node) -> _Key | None:
        begin, end = node.depth * self._page_size, (node.depth + 1) * self._page_size
        prompt = request.prompt_token_ids
        return (node, tuple(prompt[begin:end])) if end <= len(prompt) else None

    def _num_shared(self, request: Request, leader: Request, depth: int) -> int:
        """Return how many pages both prompts share and `request` could use. The first `depth` are known to be equal."""
        mine, theirs, size = request.prompt_token_ids, leader.prompt_token_ids, self._page_size
        limit = min((request.num_tokens - 1) // size, len(mine) // size, len(theirs) // size)
        if mine is theirs:
            return limit
        known = request.shared_with
        if known is not None and known[0] == leader.request_id:
            return min(limit, known[1])
        page = depth
        while page < limit and mine[page * size : (page + 1) * size] == theirs[page * size : (page + 1) * size]:
            page += 1
        request.shared_with = leader.request_id, page
        return page
