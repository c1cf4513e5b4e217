"""The parent's side of the template worker: one process, one conversation at a time, killed if it takes too long.

process = TemplateProcess(setup)
text = process.render(conversation)  # blocks: call it from a thread
process.stop()
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import subprocess
import threading
import time

import msgspec

from jaxserve.errors import ConfigError, InvalidValueError, ServerError
from jaxserve.text.template_worker import Rendered, TemplateInput, TemplateSetup
from jaxserve.transport.child import HEAD_BYTES, child_environment, frame_size, framed, python_command

CPU_SECONDS = 3.0  # CPU time of a frame; the render itself has 1 s, and compiling 256 KiB takes 2 s
WALL_SECONDS = 15.0  # the last resort, on a machine that gives the worker too little of a processor
MEMORY_BYTES = 1 << 30
TEMPLATE_READ_BYTES = 1 << 20  # bytes of a read

_RENDERED = msgspec.json.Decoder(Rendered)

logger = logging.getLogger(__name__)


class _Ended(Exception):
    """The worker ended, or was ended after its time."""


class TemplateProcess:
    """A worker process, started when it is first needed and again after it ended. Safe to use from several threads."""

    def __init__(self, setup: TemplateSetup) -> None:
        self.wall_seconds = WALL_SECONDS
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Compile the template. Raises ConfigError if that fails or takes too much time or memory."""
        with self._lock:
            self._running()

    def render(self, conversation: TemplateInput) -> str:
        """Return the prompt's text. Raises InvalidValueError if the template refuses it or exceeds a limit."""
        try:
            body = msgspec.json.encode(conversation)
        except (UnicodeEncodeError, RecursionError):
            raise InvalidValueError("the messages are no text or nested too deep", param="messages") from None
        with self._lock:
            try:
                rendered = self._exchange(self._running(), body)
            except ConfigError as error:  # it was compiled before: the machine is too busy, or full
                logger.error("the template worker does not start: %s", error)
                raise ServerError("the chat template cannot be rendered now; the server's log says why") from error
            except _Ended:
                if self._stopped:
                    raise ServerError("the server stops") from None
                message = "the chat template was stopped: it takes too long or too much memory"
                raise InvalidValueError(message, param="messages") from None
        if rendered.error is not None:
            raise InvalidValueError(rendered.error, param=rendered.param)
        return rendered.text

    def stop(self) -> None:
        """End the worker. A render that waits for it fails."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._forget()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._forget()  # it ended while it was idle
        if self._stopped:
            raise ServerError("the server stops")
        process = self._process = _started()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError):  # the system limits the large pipes of a user
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, TEMPLATE_READ_BYTES)
        try:
            error = self._exchange(process, msgspec.json.encode(self._setup)).error
        except _Ended:
            error = "the chat template takes too long or too much memory to compile"
        if error is not None:
            self._forget()
            raise ConfigError(error, fix="see model.chat_template")
        return process

    def _exchange(self, process: subprocess.Popen[bytes], body: bytes) -> Rendered:
        """Send a frame and return the answer. Raises _Ended after which the process is gone."""
        deadline = time.monotonic() + self.wall_seconds
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin.fileno(), framed(body), deadline)
            size = frame_size(_receive(process.stdout.fileno(), HEAD_BYTES, deadline))
            return _RENDERED.decode(_receive(process.stdout.fileno(), size, deadline))
        except (OSError, ValueError, TimeoutError) as error:
            self._forget()
            raise _Ended from error
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


def _started() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            python_command("jaxserve.text.template_worker"),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal is for the server alone, which drains
        )
    except OSError as error:
        raise ConfigError(f"the process for chat templates does not start: {error}", fix="") from error


def _send(pipe: int, data: bytes, deadline: float) -> None:
    rest = memoryview(data)
    while rest:
        _wait([], [pipe], deadline)
        rest = rest[os.write(pipe, rest) :]


def _receive(pipe: int, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        _wait([pipe], [], deadline)
        piece = os.read(pipe, min(TEMPLATE_READ_BYTES, size - len(data)))
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
