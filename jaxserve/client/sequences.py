"""The accepted sequences that have not ended, by engine id and by the client's id.

An engine id is made here and used once. Many requests may have the same client id at the same time; it is only used
to find the requests to abort.

`HeldDeadlines` ends requests whose deadline passes while no engine has them: they wait until an engine is started
again, are held back in a search for a culprit, or have their pages on the way to another engine. An engine ends its own
requests.

An `OutputQueue` is between the engine's outputs of one request and the reader of its stream.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from jaxserve.errors import HTTPError, RequestTimeoutError, ServerError
from jaxserve.text.detokenizer import RequestOutput, error_of
from jaxserve.types.sampling import EngineRequest, Prefilled
from jaxserve.types.step import TokenOutput

NOWHERE = -1  # the replica of a sequence for which none is chosen yet, or whose pages are handed over


class SequenceState(Protocol):
    """The output of one sequence so far: a SequenceText, or only the tokens if another process makes the text."""

    index: int
    output_token_ids: list[int]
    thinks_too_long: bool
    stopped_by_text: bool

    def push(self, output: TokenOutput) -> Any: ...

    def end_thinking(self) -> Any: ...


class OutputSink(Protocol):
    """Receives the outputs of a sequence: each result of `SequenceState.push`, or the error that ends it."""

    def put(self, item: Any) -> None: ...


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A live sequence: the request that was sent, its state, and where its outputs go."""

    request: EngineRequest
    text: SequenceState
    outputs: OutputSink
    accepted_at: float = field(default_factory=time.monotonic)
    unit: str = field(init=False)  # id of the request; siblings share it
    key: str = field(init=False)  # constant, even if the engine id changes
    is_sent: bool = False  # to the engine that is up
    is_answered: bool = False  # by an engine: values that are sent once were sent
    waiting: bool = True  # not admitted by the engine; False for a preempted one
    was_admitted: bool = False  # by an engine that died, and not yet by its successor
    replica: int = NOWHERE  # the engine that has it, or will get it
    prefill_only: bool = False  # its replica only computes the prompt, see prompt_handover.py
    prefilled: Prefilled | None = None  # values reported by the replica that only computed the prompt
    num_deaths: int = 0  # engines that died while they worked on it
    suspected: int = 0  # outputs that it must give until the last of these deaths is not held against it
    aborted: bool = False  # if the engine dies before it answers the abort, the sequence is not sent again

    def __post_init__(self) -> None:
        self.unit = self.request.group or self.request.request_id
        self.key = f"{self.unit}.{self.text.index}"

    @staticmethod
    def unit_of(key: str) -> str:
        return key.partition(".")[0]

    @property
    def engine_id(self) -> str:
        return self.request.request_id

    @property
    def message_key(self) -> tuple[str, int]:
        """The common key of the sequences of one Add: the unit and the id of the list of prompt tokens.

        A worker sends a choice anew when its thinking ends, with a list of its own.
        """
        return self.unit, id(self.request.prompt_token_ids)

    def failure(self, output: TokenOutput) -> HTTPError:
        """Return the exception for a failed output."""
        error = error_of(output)
        # an engine accepted it before the crash, so it is not the client's mistake that the next one refuses it
        if self.was_admitted and error.status < 500:
            return ServerError(f"the engine was restarted and cannot go on with this request: {error.message}")
        return error


class SequenceTable:
    """All live sequences of one AsyncEngine. prefix: prefix of its engine ids"""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self.num_waiting_tokens = 0  # prompt tokens of the waiting sequences
        self._sequences: dict[str, LiveSequence] = {}
        self.get = self._sequences.get  # engine id -> sequence or None; every output calls it, so it has no frame
        self._of_client: dict[str, dict[str, LiveSequence]] = {}  # client id -> engine id -> sequence
        self.num_of: Counter[int] = Counter()  # replica -> number of its sequences
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[LiveSequence]:
        """Iterate over a copy, because sequences may be removed meanwhile."""
        return iter(list(self._sequences.values()))

    def new_id(self) -> str:
        """Return a new engine id. Ids are unique across clients and engine restarts."""
        return f"{self._prefix}{next(self._numbers):x}"

    def add(self, sequence: LiveSequence) -> None:
        self._enter(sequence)
        self.num_waiting_tokens += len(sequence.request.prompt_token_ids)

    def _enter(self, sequence: LiveSequence) -> None:
        self._sequences[sequence.engine_id] = sequence
        self.num_of[sequence.replica] += 1
        self._of_client.setdefault(sequence.request.client_id, {})[sequence.engine_id] = sequence

    def renew_id(self, sequence: LiveSequence) -> None:
        """Give a live sequence a new engine id. Outputs for the old id no longer reach it."""
        self._leave(sequence)
        sequence.request = msgspec.structs.replace(sequence.request, request_id=self.new_id())
        self._enter(sequence)

    def of_client(self, client_id: str) -> list[LiveSequence]:
        """Return the live sequences of all requests with this client id."""
        return list(self._of_client.get(client_id, {}).values())

    def admit(self, engine_ids: Iterable[str]) -> None:
        """Mark sequences that the engine admitted as no longer waiting."""
        for engine_id in engine_ids:
            if (sequence := self._sequences.get(engine_id)) is not None:
                sequence.was_admitted = False
                self.mark_started(sequence)

    def mark_started(self, sequence: LiveSequence) -> None:
        """Mark a sequence as no longer waiting: it was admitted, gave an output or ended."""
        if sequence.waiting:
            sequence.waiting = False
            self.num_waiting_tokens -= len(sequence.request.prompt_token_ids)

    def remove(self, sequence: LiveSequence) -> bool:
        """Remove a sequence. Returns whether it was live."""
        if sequence.engine_id not in self._sequences:
            return False
        self.mark_started(sequence)
        self._leave(sequence)
        return True

    def assign(self, sequence: LiveSequence, replica: int) -> None:
        """Give a live sequence to another replica."""
        self.num_of[sequence.replica] -= 1
        self.num_of[replica] += 1
        sequence.replica = replica

    def _leave(self, sequence: LiveSequence) -> None:
        del self._sequences[sequence.engine_id]
        self.num_of[sequence.replica] -= 1
        client_id = sequence.request.client_id
        siblings = self._of_client[client_id]
        del siblings[sequence.engine_id]
        if not siblings:
            del self._of_client[client_id]


class ReplicaShare:
    """The live sequences of one replica."""

    def __init__(self, table: SequenceTable, replica: int) -> None:
        self._table = table
        self._replica = replica
        self.get = table.get  # an engine id is in one replica
        self.renew_id = table.renew_id

    def __len__(self) -> int:
        return self._table.num_of[self._replica]

    def __iter__(self) -> Iterator[LiveSequence]:
        """Iterate over a copy, because sequences may be removed meanwhile."""
        return (sequence for sequence in self._table if sequence.replica == self._replica)


DEADLINE_INTERVAL = 0.5  # seconds


class HeldDeadlines:
    """Looks for sequences that are overdue and in no engine.

    end: ends a sequence with an error. on_ended: called after some have ended
    """

    def __init__(
        self, live: SequenceTable, end: Callable[[LiveSequence, HTTPError], None], on_ended: Callable[[], None]
    ) -> None:
        self._live = live
        self._end = end
        self._on_ended = on_ended

    async def run(self) -> None:
        """Look for overdue requests until cancelled."""
        while True:
            await asyncio.sleep(DEADLINE_INTERVAL)
            ended = [self._end_if_overdue(sequence) for sequence in self._live if not sequence.is_sent]
            if any(ended):
                self._on_ended()

    def _end_if_overdue(self, sequence: LiveSequence) -> bool:
        deadline = sequence.request.deadline
        if deadline is None or time.monotonic() - sequence.accepted_at < deadline:
            return False
        self._end(sequence, RequestTimeoutError(f"the deadline of {deadline:g} s has passed"))
        return True


MAX_AT_ONCE = 32  # outputs read in a row; with 20 log-probabilities each takes 0.1 ms to write


class OutputQueue:
    """A queue of outputs for one reader. Every token passes here; asyncio.Queue takes 1.5 us longer per item."""

    __slots__ = ("__weakref__", "_at_once", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[RequestOutput | HTTPError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._at_once = 0  # outputs read since the reader last yielded to the event loop

    def put(self, item: RequestOutput | HTTPError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def held_bytes(self) -> int:
        """Return an estimate of the memory of the unread outputs in bytes.

        It uses the size of the last one, because thousands may wait.
        """
        last = self._items[-1] if self._items else None
        return len(self._items) * last.held_bytes() if isinstance(last, RequestOutput) else 0

    async def get(self) -> RequestOutput | HTTPError:
        """Wait for and return the next output. Yields to the event loop every MAX_AT_ONCE outputs."""
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
            # writing prompt log-probabilities takes as long as writing a thousand other outputs
            self._at_once = MAX_AT_ONCE
        return item
