"""What admission estimates: how many tokens running requests will still need, whether there is room for one more, and
which prefill is worth waiting for.

Pure arithmetic over Requests and what they hold; takes and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.radix_cache import Node
from jaxserve.engine.request import Request

CLIP_NEW_TOKENS = 4096  # of a larger max_tokens no more is reserved: hardly any answer is that long
FLOOR_FACTOR = 0.14  # the ratio decays to this share of its start
DECAY_STEPS = 600  # decode steps from the start value to the floor
MARGIN_STEPS = 20  # decode steps without another retraction that one retraction should buy


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
        self._ratio = ratio
        self._kv = kv

    def reserve(self, requests: Iterable[Request]) -> list[int]:
        """What requests are expected to grow by; with a window no further than it reaches."""
        reserved = [self._ratio.reserve(requests)]
        if (window := self._kv.window) is not None:
            size = self._kv.page_size
            growth = [(request, window.num_to_grow(request, request.cache_node) * size) for request in requests]
            reserved.append(sum(min(self._ratio.reserve((request,)), room) for request, room in growth if room))
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

    Keyed by what follows the cached prefix: (its node, the tokens of the next page).
    """

    def __init__(self, page_size: int, prefix_cache: bool) -> None:
        self._page_size = page_size
        self._prefix_cache = prefix_cache
        self._leaders: dict[tuple[Node, tuple[int, ...]], Request] = {}
        self._keys: dict[Request, tuple[Node, tuple[int, ...]]] = {}

    def add(self, request: Request, node: Node) -> None:
        if self._prefix_cache and (key := self._key(request, node)):
            self._leaders[key] = request
            self._keys[request] = key

    def remove(self, request: Request) -> None:
        """It has put its pages into the cache, or never will."""
        key = self._keys.pop(request, None)
        if key is not None and self._leaders.get(key) is request:
            del self._leaders[key]

    def worth_waiting(self, request: Request, node: Node) -> bool:
        """Whether a prefill in progress will spare `request` at least half the tokens that it has yet to compute.

        The bound keeps a short request from waiting behind a long one for the sake of a few shared tokens.
        """
        key = self._key(request, node) if self._leaders else None
        leader = self._leaders.get(key) if key else None
        if leader is None or request.reads_whole_prompt or leader.priority > request.priority:
            return False  # a leader of worse priority may itself be waiting for this one
        gain = self._num_shared(request, leader, node.depth) * self._page_size
        return gain > 0 and 2 * gain >= leader.num_prefill_tokens - leader.num_computed_tokens

    def _key(self, request: Request, node: Node) -> tuple[Node, tuple[int, ...]] | None:
        begin, end = node.depth * self._page_size, (node.depth + 1) * self._page_size
        prompt = request.prompt_token_ids
        return (node, tuple(prompt[begin:end])) if end <= len(prompt) else None

    def _num_shared(self, request: Request, leader: Request, depth: int) -> int:
        """Pages beyond `depth` that both prompts begin with and `request` could use."""
        mine, theirs, size = request.prompt_token_ids, leader.prompt_token_ids, self._page_size
        limit = min((request.num_tokens - 1) // size, len(mine) // size, len(theirs) // size)
        if mine[: limit * size] == theirs[: limit * size]:
            return limit - depth
        page = depth
        while mine[page * size : (page + 1) * size] == theirs[page * size : (page + 1) * size]:
            page += 1
        return min(page, limit) - depth
