"""Messages between this package's processes over pipes: 4 bytes of length, big endian, then the body.

Also the limit on memory that a child sets itself before it does what may cost too much.
"""

from __future__ import annotations

import os
import resource
import struct
from typing import BinaryIO

import msgspec

MAX_FRAME = 256 * 2**20  # a tokenizer.json may have 30 MB
HEAD_BYTES = 4


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None where the stream ends. The stream is unbuffered, so that select() tells the truth."""
    head = _read_exactly(stream, HEAD_BYTES)
    return None if head is None else _read_exactly(stream, frame_size(head))


def frame_size(head: bytes) -> int:
    """Bytes of the body. Raises ValueError for more than MAX_FRAME."""
    (size,) = struct.unpack(">I", head)
    if size > MAX_FRAME:
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
    """Write all of it, waiting for whoever reads."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def take_pipes() -> tuple[BinaryIO, int]:
    """This process's stdin, unbuffered, and what was its stdout. Whatever prints from now on prints to stderr."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(0, "rb", buffering=0), stdout


def limit_memory(extra: int) -> None:
    """Let this process take `extra` bytes more than it has."""
    if not os.path.exists("/proc/self/statm"):
        return  # no such limit on this system
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, now + extra))
