"""The API process's end of the wire to an engine: a child process behind a private socket.

Owns the child, its directory and its sockets. Knows messages, not what they mean. No jax here.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from jaxserve.config import Config
from jaxserve.engine.messages import FromEngine, MessageError, Stop, ToEngine, decode_from_engine, encode
from jaxserve.errors import EngineDeadError

STOP_TIMEOUT = 5.0  # seconds a child is given to end by itself


class EngineLink(Protocol):
    """A way to reach one engine. After EngineDeadError it can be started again."""

    @property
    def beats(self) -> bool:
        """Whether the engine sends Beat messages."""
        ...

    async def start(self) -> None: ...

    def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDeadError when the engine is gone and no message is left."""
        ...

    def dump_stacks(self) -> None:
        """Ask the engine to write the stacks of its threads to its log."""
        ...

    def kill(self) -> None:
        """End the engine at once, whatever it does."""
        ...

    async def stop(self) -> None: ...


class ProcessLink:
    """An engine in a child process. module: what the child runs."""

    beats = True

    def __init__(self, config: Config, module: str = "jaxserve.engine.process") -> None:
        self._config = config
        self._module = module
        self._directory: Path | None = None
        self._context: zmq.asyncio.Context | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        await self.stop()
        self._directory = Path(tempfile.mkdtemp(prefix="jaxserve-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self._outgoing = self._bind(self._context, zmq.PUSH, "to-engine")
        self._incoming = self._bind(self._context, zmq.PULL, "from-engine")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            str(self._directory),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._config.model_dump_json().encode() + b"\n")
        self._ended = asyncio.ensure_future(self._process.wait())

    def _bind(self, context: zmq.asyncio.Context, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{self._directory}/{name}")
        return socket

    def send(self, message: ToEngine) -> None:
        if self._process is None or self._process.returncode is not None:
            return  # receive() reports the death; what was lost with it is replayed from there
        with contextlib.suppress(zmq.Again):  # the child's end is closed: it is dying, and the same holds
            zmq.Socket.send(self._outgoing, encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        assert self._ended is not None
        while True:
            frame = asyncio.ensure_future(self._incoming.recv())
            await asyncio.wait((frame, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not frame.done():  # the child ended: only what is already in the socket can still come
                await asyncio.wait((frame,), timeout=0.1)
            if not frame.done():
                frame.cancel()
                raise EngineDeadError(f"the engine process ended with status {self._ended.result()}")
            try:
                return decode_from_engine(await frame)
            except MessageError:
                continue

    def dump_stacks(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self.send(Stop())
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._close()

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._process = self._context = self._directory = None
