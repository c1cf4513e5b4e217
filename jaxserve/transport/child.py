"""Child processes of this package: how they are started, and the frames on their pipes.

This file does without asyncio and numpy, which would double the start time of a template worker.

`python_command` and `child_environment` start a child such that nothing is imported from the working directory, which
`python -m` puts first on the import path. A model directory may contain `zmq.py`, and the operator may run the server
there. PYTHONPATH is used without its empty entries, which also mean the working directory.

Frames are length-prefixed messages over pipes: 4 bytes of length, big-endian, then the body. `limit_memory` is the
limit that a child sets itself before risky work.
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import sys
import threading
from collections.abc import Mapping
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


_PATH = "PYTHONPATH"


def python_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of this package, without the working directory on its path."""
    return [sys.executable, "-P", "-m", module, *words]


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a copy of `environ` for a child, with PYTHONPATH without its empty entries."""
    child = dict(environ)
    if _PATH in child:
        child[_PATH] = os.pathsep.join(filter(None, child[_PATH].split(os.pathsep)))
    return child


def end_with_parent() -> None:
    """Start a thread that waits until stdin closes, which means that the parent ended, and then exits at once."""
    threading.Thread(target=_wait_and_exit, name="parent-watch", daemon=True).start()


def _wait_and_exit() -> None:
    wait_for_end()
    os._exit(1)


def wait_for_end() -> None:
    """Return when stdin has closed.

    Reads the descriptor itself: Python aborts at its end if a daemon thread holds the lock of `sys.stdin.buffer`.
    """
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
