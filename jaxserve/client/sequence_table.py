"""The sequences that AsyncEngine has accepted and that have not ended: found by engine id, or by the client's id.

An engine id is made here and used once. A client's id may be used by many requests at the same time: it only finds
what an abort is meant for.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from jaxserve.errors import HTTPError
from jaxserve.text.output.sequence_text import RequestOutput, SequenceText
from jaxserve.types.sampling import EngineRequest

MAX_AT_ONCE = 32  # outputs of one reader; with 20 log-probabilities each takes 0.1 ms to write


class Outbox:
    """Outputs for one reader. An asyncio.Queue does the same at 1.5 us an item more, and every token passes here."""

    __slots__ = ("__weakref__", "_at_once", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[RequestOutput | HTTPError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._at_once = 0  # outputs read since the reader last gave the event loop back

    def put(self, item: RequestOutput | HTTPError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def held_bytes(self) -> int:
        """About the memory of what was not read yet. One output stands for all: thousands may wait."""
        last = self._items[-1] if self._items else None
        return len(self._items) * last.held_bytes() if isinstance(last, RequestOutput) else 0

    async def get(self) -> RequestOutput | HTTPError:
        while not self._items:
            self._at_once = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._at_once += 1
        if self._at_once >= MAX_AT_ONCE:
            self._at_once = 0
            await asyncio.sleep(0)
        item = self._items.popleft()
        if isinstance(item, RequestOutput) and item.prompt_logprobs is not None:
            self._at_once = MAX_AT_ONCE  # to write these takes as long as to write a thousand others
        return item


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One sequence on its way: what was sent, its text state, and where its outputs go."""

    request: EngineRequest
    text: SequenceText
    outputs: Outbox
    started: float = field(default_factory=time.monotonic)
    unit: str = field(init=False)  # the request: siblings have the same
    key: str = field(init=False)  # made once, whatever engine ids the sequence gets
    is_sent: bool = False  # to the engine that is up
    is_answered: bool = False  # by an engine: what comes once has come
    waiting: bool = True  # the engine has not admitted it; a preempted one was
    was_admitted: bool = False  # by an engine that is dead, and not yet by another
    aborted: bool = False  # an engine that dies before it answers the abort is not sent the sequence again

    def __post_init__(self) -> None:
        self.unit = self.request.group or self.request.request_id
        self.key = f"{self.unit}.{self.text.index}"

    @staticmethod
    def unit_of(key: str) -> str:
        return key.partition(".")[0]

    @property
    def engine_id(self) -> str:
        return self.request.request_id


class SequenceTable:
    """All live sequences of one AsyncEngine."""

    def __init__(self) -> None:
        self.num_waiting_tokens = 0  # prompt tokens of the sequences that wait
        self._sequences: dict[str, LiveSequence] = {}
        self._of_client: dict[str, dict[str, LiveSequence]] = {}  # client id -> engine id -> sequence
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[LiveSequence]:
        """Over a copy: a sequence may be removed meanwhile."""
        return iter(list(self._sequences.values()))

    def new_id(self) -> str:
        """Make an engine id. No id is made twice, whatever clients choose and however engines are restarted."""
        return format(next(self._numbers), "x")

    def add(self, sequence: LiveSequence) -> None:
        self._enter(sequence)
        self.num_waiting_tokens += len(sequence.request.prompt_token_ids)

    def _enter(self, sequence: LiveSequence) -> None:
        self._sequences[sequence.engine_id] = sequence
        self._of_client.setdefault(sequence.request.client_id, {})[sequence.engine_id] = sequence

    def renew_id(self, sequence: LiveSequence) -> None:
        """Give a live sequence another engine id: what comes for the old one reaches it no more."""
        self._leave(sequence)
        sequence.request = msgspec.structs.replace(sequence.request, request_id=self.new_id())
        self._enter(sequence)

    def get(self, engine_id: str) -> LiveSequence | None:
        return self._sequences.get(engine_id)

    def of_client(self, client_id: str) -> list[LiveSequence]:
        """The live sequences of all requests that a client gave this id."""
        return list(self._of_client.get(client_id, {}).values())

    def admit(self, engine_ids: Iterable[str]) -> None:
        """Count the sequences that the engine has admitted as waiting no more."""
        for engine_id in engine_ids:
            if (sequence := self._sequences.get(engine_id)) is not None:
                sequence.was_admitted = False
                self.started(sequence)

    def started(self, sequence: LiveSequence) -> None:
        """Count a sequence as waiting no more: it was admitted, gave an output or ended."""
        if sequence.waiting:
            sequence.waiting = False
            self.num_waiting_tokens -= len(sequence.request.prompt_token_ids)

    def remove(self, sequence: LiveSequence) -> bool:
        """Forget a sequence; whether it was live."""
        if sequence.engine_id not in self._sequences:
            return False
        self.started(sequence)
        self._leave(sequence)
        return True

    def _leave(self, sequence: LiveSequence) -> None:
        del self._sequences[sequence.engine_id]
        client_id = sequence.request.client_id
        siblings = self._of_client[client_id]
        del siblings[sequence.engine_id]
        if not siblings:
            del self._of_client[client_id]
