"""State in memory that processes of one server share. It can be read whatever the other processes are doing.

    SharedState      of one engine process, for the API process: its two counters and its requests in work
    WorkRecord       records the requests in work before the engine starts on them, so that they survive a crash
    SharedCounters   numbers of all API processes: each process writes one row and reads all of them

A SharedState has `beats` (the process is alive), `iterations` (its loop makes progress) and the engine ids of the
requests in work. One process writes and the other reads, without a lock. The ids are written to the invalid one of two
halves, then one byte makes it valid. A process killed while writing leaves the previous ids.

A request is in work from the dispatch of a step that contains it until two steps later, because two steps may be on
the device at once. It is also in work while it is received or its grammar is compiled.

A number of SharedCounters is 8 bytes, aligned, so a reader never sees half of a write. There is no lock.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxserve.types.step import SchedulerOutput, StepHandle, StepRunner

_COUNTER = struct.Struct("<Q")
_PULSE = struct.Struct("<QQ")
_VALID = 16  # offset of the byte that names the valid half
_HALVES = (4096, 4096 + 2**20)  # offsets in bytes; the file is sparse and only uses what is written
_LENGTH = struct.Struct("<I")
_SIZE = _HALVES[1] + 2**20


_IDS = msgspec.msgpack.Decoder(list[str])


class Pulse(NamedTuple):
    """Counters of an engine process since its start."""

    beats: int
    iterations: int


class SharedState:
    """Writes and reads the shared memory.

    path: a file made by `create`; None: memory of this process only, for an engine in a thread.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, _SIZE)
            return
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)

    @staticmethod
    def create(descriptor: int) -> None:
        """Set the size of a new, empty file."""
        os.ftruncate(descriptor, _SIZE)

    def close(self) -> None:
        self._memory.close()

    @property
    def pulse(self) -> Pulse:
        return Pulse(*_PULSE.unpack_from(self._memory))

    def beat(self, beats: int) -> None:
        _COUNTER.pack_into(self._memory, 0, beats)

    def count_iterations(self, iterations: int) -> None:
        _COUNTER.pack_into(self._memory, _COUNTER.size, iterations)

    @property
    def in_work(self) -> list[str]:
        """Ids of the requests in work; [] if there are none or they are unknown."""
        start = _HALVES[self._memory[_VALID] & 1]
        (length,) = _LENGTH.unpack_from(self._memory, start)
        start += _LENGTH.size
        return _IDS.decode(self._memory[start : start + length]) if length else []

    def write(self, ids: list[str]) -> None:
        """Replace the ids in work."""
        data = msgspec.msgpack.encode(ids)
        if len(data) > _HALVES[1] - _HALVES[0] - _LENGTH.size:
            data = b""
        half = 1 - (self._memory[_VALID] & 1)
        start = _HALVES[half]
        _LENGTH.pack_into(self._memory, start, len(data))
        self._memory[start + _LENGTH.size : start + _LENGTH.size + len(data)] = data
        self._memory[_VALID] = half


class SharedCounters:
    """A table float64 [rows, columns] that begins with zeros. descriptor: a file made by `create`"""

    def __init__(self, descriptor: int, num_rows: int, num_columns: int) -> None:
        self._memory = mmap.mmap(descriptor, num_rows * num_columns * 8)
        numbers = memoryview(self._memory).cast("d")
        self.rows: Sequence[memoryview[float]] = [
            numbers[start : start + num_columns] for start in range(0, num_rows * num_columns, num_columns)
        ]

    @staticmethod
    def create(num_rows: int, num_columns: int) -> int:
        """Return the descriptor of a new file for the table, which has no name."""
        descriptor, path = tempfile.mkstemp(prefix="jaxserve-board-")
        os.unlink(path)
        os.ftruncate(descriptor, num_rows * num_columns * 8)
        return descriptor

    def total(self, column: int) -> float:
        """Return the sum of one number over all processes."""
        return sum(row[column] for row in self.rows)

    def clear(self, row: int) -> None:
        """Set the numbers of a process that has ended to zero."""
        for column in range(len(self.rows[row])):
            self.rows[row][column] = 0.0


class WorkRecord:
    """Records the requests in work. Only changes are written: 256 rows that go on decoding cost 5 us per step, 256 new
    rows 20 us.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._step: list[str] = []  # ids of the latest step
        self._written: list[str] = []  # ids of the two latest steps
        self._others: list[str] = []

    def dispatching(self, ids: list[str]) -> None:
        """Record that a step that works for these requests is dispatched next."""
        rows = ids if ids == self._step else list(dict.fromkeys(self._step + ids))
        self._step = ids
        if rows != self._written:
            self._written = rows
            self._state.write(rows + self._others)

    def taking_in(self, ids: list[str]) -> None:
        """Record that exactly these requests are being received or compiled."""
        if ids != self._others:
            self._others = ids
            self._state.write(self._written + ids)


class RecordingRunner:
    """A StepRunner that records each step before it dispatches it."""

    def __init__(self, inner: StepRunner, record: WorkRecord) -> None:
        self._inner = inner
        self._record = record

    def execute(self, output: SchedulerOutput) -> StepHandle:
        if ids := output.request_ids:
            self._record.dispatching(ids)
        return self._inner.execute(output)

    def rebuild(self) -> None:
        self._inner.rebuild()

    def num_compiles(self) -> int:
        return self._inner.num_compiles()

    def close(self) -> None:
        self._inner.close()
