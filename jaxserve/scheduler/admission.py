"""What admission estimates: how many tokens running requests will still need, whether there is room for one more, and
which prefill is worth waiting for.

Pure arithmetic over Requests and what they hold; takes and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxserve.kv.kv_manager import KVManager
from jaxserve.kv.radix_cache import Node
from jaxserve.types.request import Request

CLIP_NEW_TOKENS = 4096  # of a larger max_tokens no more is reserved: hardly any answer is that long
FLOOR_FACTOR = 0.14  # the ratio decays to this share of its start
DECAY_STEPS = 600  # decode steps from the start value to the floor
MAX_STALL = 16  # steps; a prefill that had no part in so many is not waited for
MARGIN_STEPS = 20  # decode steps without another retraction that one retraction should buy


_Key = tuple[Node, tuple[int, ...]]


class NewTokenRatio:
    """The share of its remaining max_tokens that a request is expected to generate.

    Falls while all goes well, rises to what was seen when pages ran out. The scheme and its constants are those of
    SGLang's scheduler: low means more requests at once, high means fewer retractions.
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
        """Pages ran out; `kept` are the requests that stay."""
        decoded = total = 0
        for request in kept:
            decoded += len(request.output_token_ids) + MARGIN_STEPS
            total += request.max_tokens
        self.value = min(1.0, max(self.value, decoded / (total + 1)))

    def reserve(self, requests: Iterable[Request]) -> int:
        """Tokens that these requests are expected to generate from here. Those that nothing stops use all they may."""
        certain = likely = 0
        for request in requests:
            left = request.max_tokens - len(request.output_token_ids)
            if not request.stop_token_ids:
                certain += left
            else:
                likely += left if left < CLIP_NEW_TOKENS else CLIP_NEW_TOKENS
        return certain + math.ceil(likely * self.value)


class Room:
    """Tokens of each group of layers, those that see everything first: what requests will take, and what is lacking."""

    def __init__(self, ratio: NewTokenRatio, kv: KVManager) -> None:
        self.ratio = ratio
        self._kv = kv

    def reserve(self, requests: Iterable[Request]) -> list[int]:
        """What requests are expected to grow by; with a window no further than it reaches."""
        reserved = [self.ratio.reserve(requests)]
        if (window := self._kv.window) is not None:
            size = self._kv.page_size
            growth = [(request, window.num_to_grow(request, request.cache_node) * size) for request in requests]
            reserved.append(sum(min(self.ratio.reserve((request,)), room) for request, room in growth if room))
        return reserved

    def missing(self, request: Request, node: Node, reserved: list[int], *, alone: bool) -> list[int]:
        """What is lacking to admit a request beside those that `reserved` is for (below 0: is left). Alone on the
        device it needs no reserve to grow."""
        pairs = zip(self._kv.available(), self._kv.num_new_pages(request, node), strict=True)
        room = [(available - new) * self._kv.page_size for available, new in pairs]
        if min(room) >= 0 and alone:
            return [-there for there in room]
        groups = zip(reserved, self.reserve((request,)), room, strict=True)
        return [others + own - there for others, own, there in groups]


class PrefillsInProgress:
    """Prompts being computed whose pages a waiting request could soon share, as the siblings of an n > 1 request do.

    The cache has their pages up to `cache_node`, so they are found by what follows it: (the node, the next page's
    tokens). Siblings are found by their group.
    """

    def __init__(self, page_size: int, prefix_cache: bool) -> None:
        self._page_size = page_size
        self._prefix_cache = prefix_cache
        self._leaders: dict[_Key, Request] = {}
        self._keys: dict[Request, _Key | None] = {}
        self._started: dict[Request, int] = {}  # step in which a request started
        self._siblings: dict[str, Request] = {}  # by group, the last one that started
        self._by_id: dict[str, Request] = {}

    def add(self, request: Request, step: int) -> None:
        """A request starts in this step."""
        if self._prefix_cache:
            self._started[request] = step
            self._siblings[request.group] = request
            self._by_id[request.request_id] = request
            self._register(request)

    def advance(self, request: Request) -> None:
        """The cache has more of its pages."""
        if request in self._started:
            self._unregister(request)
            self._register(request)

    def remove(self, request: Request) -> None:
        """The cache has all its pages, or never will."""
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
        """Whether `worth_waiting` is true of a sibling, or of a prompt that was compared with this one in an earlier
        step, found without a look at the prompt.

        A sibling is also the hint for the request's next match in the prefix cache.
        """
        sibling = self._siblings.get(request.group) if request.group else None
        if sibling is not None and sibling.prompt_token_ids is request.prompt_token_ids:
            if request.slot is None:
                request.cache_node = sibling.cache_node
            return self._is_worth(request, sibling, sibling.cache_node.depth, step)
        known = self._by_id.get(request.shared_with[0]) if request.shared_with else None
        return known is not None and self._is_worth(request, known, known.cache_node.depth, step)

    def worth_waiting(self, request: Request, node: Node, step: int) -> bool:
        """Whether a prefill in progress will spare `request` at least half the tokens that it has yet to compute.

        The request waits until the pages that both begin with are computed, and not for the rest of the other prompt.
        """
        key = self._key(request, node) if self._leaders else None
        leader = self._leaders.get(key) if key else None
        return leader is not None and self._is_worth(request, leader, node.depth, step)

    def _is_worth(self, request: Request, leader: Request, depth: int, step: int) -> bool:
        """depth: pages that the cache has of both prompts."""
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
        """Pages that both prompts begin with and `request` could use. The first `depth` are known to be equal."""
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
