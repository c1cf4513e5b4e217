"""Share counters between the API processes of a server with `server.workers`, so that its limits hold for all of them.

Row 0 of the board belongs to the main process and every other row to a worker. A limit of the server is compared with
the sum of the rows. The main process also writes two facts that only it knows: the engine's queue, and the seconds
that a key has to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.api.body_cost import BodySum
from jaxserve.api.keys import COUNTS, KeyUsage, KeyUsages
from jaxserve.api.sessions import Sessions
from jaxserve.client.async_engine import Load
from jaxserve.telemetry.metrics import Families
from jaxserve.transport.shared_state import SharedCounters

MAIN = 0  # row of the main process
_BODIES, _LIVE, _WAITING, _RUNNING = range(4)
_FIXED = 4  # columns before the keys' columns
_WAIT = len(COUNTS)  # column of a key after its counts: seconds until it may send requests
_USED = _WAIT + 1  # tokens that are missing from its bucket
_A_KEY = _USED + 1


class NeedsMainProcessError(Exception):
    """Only the main process can answer this request. Raised before any of the answer has been sent."""


class SessionsInMainProcess(Sessions):
    """The sessions as a worker sees them: only the main process has them."""

    def context(self, *_: Any, **__: Any) -> list[int]:
        """Raise NeedsMainProcessError."""
        raise NeedsMainProcessError


class Peers(Protocol):
    """The other API processes, as the main process sees them."""

    async def abort(self, prefix: str, owner: str | None) -> list[str]:
        """Abort the requests whose ids begin with a prefix, of one owner or of all; return their ids."""
        ...

    async def tell(self) -> None:
        """Tell every process which adapters are loaded. Return when they know, or do not answer."""
        ...

    async def metrics(self) -> list[Families]:
        """Return the metrics of every process, and the last counts of processes that have ended."""
        ...


def num_columns(num_keys: int) -> int:
    """Return the columns of the board. num_keys: number of server.keys"""
    return _FIXED + (num_keys + 1) * _A_KEY


@dataclass(frozen=True)
class ProcessGroup:
    """One process of the group.

    row: its row of the board
    main_socket: path of the main process's socket; empty in the main process
    encryption_key: one key for all processes
    """

    board: SharedCounters
    row: int
    main_socket: str = ""
    encryption_key: bytes = b""

    @property
    def is_worker(self) -> bool:
        return self.row != MAIN

    def bodies(self) -> BodySum:
        """Return the counter of the bytes of this process's bodies. Its limit is for the bytes of all processes."""
        return BodySum(self.board.rows[self.row], _BODIES, lambda: self.board.total(_BODIES))

    def count_running(self, count: int) -> None:
        """Write how many requests of this process do not have their whole answer yet."""
        self.board.rows[self.row][_RUNNING] = count

    @property
    def num_running(self) -> int:
        """The number of requests, over all processes, that do not have their whole answer yet."""
        return int(self.board.total(_RUNNING))

    def engine_load(self) -> Load:
        """Return the engine's queue as the main process last wrote it."""
        row = self.board.rows[MAIN]
        return Load(int(row[_LIVE]), int(row[_WAITING]))

    def join(self, usages: KeyUsages) -> None:
        """Let every key count the requests and tokens of all processes."""
        for number, usage in enumerate(usages.all()):
            usage.peers = SharedCounts(self, _FIXED + number * _A_KEY)


class SharedCounts:
    """The counts of one key over all processes. first: the key's first column"""

    def __init__(self, group: ProcessGroup, first: int) -> None:
        self._group = group
        self._first = first
        self._seen = 0.0  # tokens of other processes that were taken from the key's bucket

    def publish(self, usage: KeyUsage) -> None:
        """Write the counts of this process."""
        row = self._group.board.rows[self._group.row]
        for place, name in enumerate(COUNTS, self._first):
            row[place] = getattr(usage, name)

    def others(self, name: str) -> int:
        """Return a count of all other processes together."""
        column = self._first + COUNTS.index(name)
        return int(self._group.board.total(column) - self._group.board.rows[self._group.row][column])

    @property
    def wait(self) -> float:
        """Return the seconds until the key may send requests, as the main process last wrote them."""
        return self._group.board.rows[MAIN][self._first + _WAIT]

    @property
    def used(self) -> float:
        """Return how many tokens are missing from the key's bucket, as the main process last wrote it."""
        return self._group.board.rows[MAIN][self._first + _USED]

    def refill(self, usage: KeyUsage) -> None:
        """Take the tokens that other processes used out of the key's bucket, and write its wait. Main process only."""
        if usage.bucket is not None:
            used = self.others("prompt_tokens") + self.others("completion_tokens")
            usage.bucket.take(int(used - self._seen))
            self._seen = used
            row = self._group.board.rows[MAIN]
            row[self._first + _WAIT], row[self._first + _USED] = usage.bucket.seconds_until_some, usage.bucket.used

    def absorb(self, row: int, usage: KeyUsage) -> None:
        """Keep the counts of a process that has ended, without its open requests. Main process only."""
        self.refill(usage)
        ended = self._group.board.rows[row]
        counts = {name: int(ended[place]) for place, name in enumerate(COUNTS, self._first)}
        self._seen -= counts["prompt_tokens"] + counts["completion_tokens"]
        usage.add(counts | {"num_live": 0})


class GroupKeeper:
    """Write the facts that only the main process knows, and keep the counts of workers that have ended."""

    def __init__(self, group: ProcessGroup, load: Callable[[], Load], usages: Callable[[], list[KeyUsage]]) -> None:
        self._group = group
        self._load = load
        self._usages = usages

    def write(self) -> None:
        """Write the engine's queue and the keys' waits. Called many times a second."""
        row, load = self._group.board.rows[MAIN], self._load()
        row[_LIVE], row[_WAITING] = load.num_live, load.waiting_tokens
        for usage in self._usages():
            if usage.peers is not None:
                usage.peers.refill(usage)

    def ended(self, row: int) -> None:
        """Keep the counts of a worker that has ended, and free its row."""
        for usage in self._usages():
            if usage.peers is not None:
                usage.peers.absorb(row, usage)
        self._group.board.clear(row)
