"""The parent's side of a worker process: one frame at a time, and killed if an answer takes too long.

Chat templates and pictures are handled in such workers, so that no request can hold up or fill the process that serves.
The other side is a module that reads frames from stdin, the first of them its setup, and answers each on stdout.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import threading
import time

from jaxserve.errors import ConfigError, ServerError
from jaxserve.transport.child import HEAD_BYTES, child_environment, frame_size, framed, python_command

WALL_SECONDS = 15.0  # the last resort, on a machine that gives the worker too little of a processor
READ_BYTES = 1 << 20  # bytes of a read


class ChildEnded(Exception):
    """The worker ended, or was ended after its time."""


class ChildProcess:
    """A worker process, started when it is first needed and again after it ended. Safe to use from several threads.

    wall_seconds: the longest time of an answer. fix: what an operator can do if it does not start
    """

    fix: str | None = None

    def __init__(self, module: str, setup: bytes) -> None:
        self.wall_seconds = WALL_SECONDS
        self._module = module
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def start(self) -> None:
        """Start the worker. Raises ConfigError if it refuses its setup, or takes too much time or memory for it."""
        with self._lock:
            self._running()

    def ask(self, body: bytes) -> bytes:
        """Send a frame and return the answer. Blocks.

        Raises ConfigError if the worker does not start, and ChildEnded if it ends or takes too long. It is then gone.
        """
        with self._lock:
            return self._exchange(self._running(), body)

    def stop(self) -> None:
        """End the worker. A call that waits for it fails."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._forget()

    def _refusal(self, answer: bytes | None) -> str | None:
        """Return why the worker refuses its setup. answer: its first one; None: it ended before"""
        return "the worker process ended at its start" if answer is None else None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._forget()  # it ended while it was idle
        if self._stopped:
            raise ServerError("the server stops")
        process = self._process = _started(self._module)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError):  # the system limits the large pipes of a user
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, READ_BYTES)
        try:
            error = self._refusal(self._exchange(process, self._setup))
        except ChildEnded:
            error = self._refusal(None)
        if error is not None:
            self._forget()
            raise ConfigError(error, fix=self.fix)
        return process

    def _exchange(self, process: subprocess.Popen[bytes], body: bytes) -> bytes:
        deadline = time.monotonic() + self.wall_seconds
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin.fileno(), framed(body), deadline)
            size = frame_size(_receive(process.stdout.fileno(), HEAD_BYTES, deadline))
            return _receive(process.stdout.fileno(), size, deadline)
        except (OSError, ValueError, TimeoutError) as error:
            self._forget()
            raise ChildEnded from error
        except BaseException:  # the answer may still come and would be taken for the next one
            self._forget()
            raise

    def _forget(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _started(module: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            python_command(module),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal is for the server alone, which drains
        )
    except OSError as error:
        raise ConfigError(f"the process {module} does not start: {error}", fix="") from error


def _send(pipe: int, data: bytes, deadline: float) -> None:
    rest = memoryview(data)
    while rest:
        _wait([], [pipe], deadline)
        rest = rest[os.write(pipe, rest) :]


def _receive(pipe: int, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        _wait([pipe], [], deadline)
        piece = os.read(pipe, min(READ_BYTES, size - len(data)))
        if not piece:
            raise BrokenPipeError
        data += piece
    return bytes(data)


def _wait(reads: list[int], writes: list[int], deadline: float) -> None:
    """Wait until a descriptor is ready, by poll(), because select() accepts no descriptor over 1,023."""
    waiting = select.poll()
    for pipe in (*reads, *writes):
        waiting.register(pipe, select.POLLIN if reads else select.POLLOUT)
    if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
