"""What an engine process leaves in memory that it shares with the API process: readable whatever either is doing.

    beats, turns     two counters: the process runs, and its loop moves on
    in work          engine ids of the requests that the engine was computing or taking in; it survives the process

One process writes and the other reads, without a lock. The ids are written into one of two halves and then made
valid by one byte, so that a process that is killed while it writes leaves the ids from before.
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
_VALID = 16  # offset of the byte that says which half is valid
_HALVES = (4096, 4096 + 2**20)  # offsets; the file is sparse, and takes what is written
_LENGTH = struct.Struct("<I")
_SIZE = _HALVES[1] + 2**20


class Pulse(NamedTuple):
    """Counters of an engine process since its start."""

    beats: int
    turns: int


class SharedState:
    """path: of a file that `create` made; None: memory of this process alone, for an engine in a thread."""

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
        """Give a new, empty file its size."""
        os.ftruncate(descriptor, _SIZE)

    def close(self) -> None:
        self._memory.close()

    @property
    def pulse(self) -> Pulse:
        return Pulse(*_PULSE.unpack_from(self._memory))

    def beat(self, beats: int) -> None:
        _COUNTER.pack_into(self._memory, 0, beats)

    def turn(self, turns: int) -> None:
        _COUNTER.pack_into(self._memory, _COUNTER.size, turns)

    @property
    def in_work(self) -> list[str]:
        """[]: none, or not known."""
        start = _HALVES[self._memory[_VALID] & 1]
        (length,) = _LENGTH.unpack_from(self._memory, start)
        start += _LENGTH.size
        return msgspec.msgpack.decode(self._memory[start : start + length], type=list[str]) if length else []

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
