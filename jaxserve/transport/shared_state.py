"""State of an engine process in memory shared with the API process. It can be read whatever either process is doing.

    beats, iterations  two counters: the process is alive, and its loop makes progress
    in work            engine ids of the requests being computed or received; they survive the process

One process writes and the other reads, without a lock. The ids are written to the invalid one of two halves, then
one byte makes it valid. A process killed while writing leaves the previous ids.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec

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
