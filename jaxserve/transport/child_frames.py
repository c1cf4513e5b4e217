"""Length-prefixed messages over pipes between processes of this package: 4 bytes, big-endian, then the body.

Also the memory limit that a child process sets itself before risky work.
"""

from __future__ import annotations

import os
import resource
import struct
from typing import BinaryIO

import msgspec

MAX_CHILD_FRAME = 256 * 2**20  # bytes; a tokenizer.json may have 30 MB
HEAD_BYTES = 4


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame; None at the end of the stream.

    The stream must be unbuffered: select() does not see what a buffer holds.
    """
    head = _read_exactly(stream, HEAD_BYTES)
    return None if head is None else _read_exactly(stream, frame_size(head))


def frame_size(head: bytes) -> int:
    """Return the length of the body in bytes. Raises ValueError if it exceeds MAX_CHILD_FRAME."""
    (size,) = struct.unpack(">I", head)
    if size > MAX_CHILD_FRAME:
        raise ValueError("frame too large")
    return size


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = stream.read(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def frame(message: msgspec.Struct) -> bytes:
    return framed(msgspec.msgpack.encode(message))


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def write(descriptor: int, data: bytes | bytearray) -> None:
    """Write all of `data`. Blocks until the reader has taken it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def take_pipes() -> tuple[BinaryIO, int]:
    """Return this process's stdin, unbuffered, and its former stdout. Later prints go to stderr."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(0, "rb", buffering=0), stdout


def limit_memory(extra: int) -> None:
    """Limit this process's memory to its current size plus `extra` bytes."""
    if not os.path.exists("/proc/self/statm"):
        return  # this system has no such limit
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, now + extra))
