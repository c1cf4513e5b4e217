"""The API process's end of the transport to an engine in a child process behind private sockets.

Owns the child process, its directory and its sockets. Does not interpret messages. No jax here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import Protocol

import zmq
import zmq.asyncio

from jaxserve.client.device_share import DeviceShare, device_shares, platform_of, replica_config
from jaxserve.config import Config
from jaxserve.errors import EngineDeadError
from jaxserve.transport.child_process import child_environment, python_command
from jaxserve.transport.shared_state import Pulse
from jaxserve.transport.socket_directory import SocketDirectory, sweep
from jaxserve.types.messages import (
    EngineInfo,
    EngineState,
    FromEngine,
    MessageError,
    Ready,
    RequestRefused,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)

STOP_TIMEOUT = 5.0  # seconds that a child has to exit by itself

logger = logging.getLogger(__name__)


class EngineLink(Protocol):
    """A connection to one engine. After EngineDeadError it can be started again."""

    def pulse(self) -> Pulse | None:
        """Heartbeat counters of the engine since its start; None for an engine in this process."""
        ...

    def in_work(self) -> list[str]:
        """Ids of the requests that the engine computes or receives, or did when it died; [] if unknown."""
        ...

    async def start(self) -> None: ...

    def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine | EngineState | RequestRefused:
        """Return the next message. Raises EngineDeadError if the engine has ended and no message is left."""
        ...

    def dump_stacks(self) -> None:
        """Ask the engine to write the stacks of its threads to its log."""
        ...

    def kill(self) -> None:
        """Kill the engine at once."""
        ...

    async def stop(self) -> None: ...


def with_plan(config: Config, info: EngineInfo) -> Config:
    """Return the configuration of a replacement engine: the same number of pages, even if less memory is free now.

    With fewer pages it would refuse requests that the previous engine had accepted. If memory is short its start
    fails, and is tried again after the delays between restarts.
    """
    pages = {"num_pages": info.num_pages, "num_window_pages": info.memory_plan.get("num_window_pages")}
    planned = {name: number for name, number in pages.items() if number}  # an encoder has no pages
    return config.model_copy(update={"cache": config.cache.model_copy(update=planned)})


class ProcessLink:
    """An engine in a child process. module: what the child runs. share: the devices that it may use"""

    def __init__(
        self, config: Config, module: str = "jaxserve.engine.process", share: DeviceShare | None = None
    ) -> None:
        self._config = config
        self._module = module
        self._share = share or DeviceShare()
        self._directory: SocketDirectory | None = None
        self._context: zmq.asyncio.Context | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None
        self._is_ready = False
        self._has_swept = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the child process with new sockets. An earlier child is stopped first."""
        await self.stop()
        self._sweep()
        self._is_ready = False
        self._directory = SocketDirectory()
        self._context = zmq.asyncio.Context()
        self._outgoing = self._bind(self._context, zmq.PUSH, "to-engine")
        self._incoming = self._bind(self._context, zmq.PULL, "from-engine")
        self._process = await asyncio.create_subprocess_exec(
            *python_command(self._module, str(self._directory.path)),
            env={**child_environment(), **self._share.environment},
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        if self._share.cores is not None:  # before its first line of configuration, so before it has threads
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self._process.pid, self._share.cores)
        assert self._process.stdin is not None
        self._process.stdin.write(self._config.without_secrets().model_dump_json().encode() + b"\n")
        self._ended = asyncio.ensure_future(self._process.wait())

    def _sweep(self) -> None:
        if not self._has_swept:
            self._has_swept = True
            if swept := sweep():
                logger.info("removed %d directories of killed servers", len(swept))

    def _bind(self, context: zmq.asyncio.Context, kind: int, name: str) -> zmq.asyncio.Socket:
        assert self._directory is not None
        socket = context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{self._directory.path}/{name}")
        return socket

    def send(self, message: ToEngine) -> None:
        if self._process is None or self._process.returncode is not None:
            return  # receive() reports the death; lost messages are sent again after the restart
        with contextlib.suppress(zmq.Again):  # the child closed its end: it is exiting, see above
            zmq.Socket.send(self._outgoing, encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        """Return the next message; invalid frames are skipped.

        Raises EngineDeadError if the process has ended and no message is left.
        """
        assert self._ended is not None
        while True:
            frame = asyncio.ensure_future(self._incoming.recv())
            await asyncio.wait((frame, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not frame.done():  # the child exited: only messages already in the socket can still come
                await asyncio.wait((frame,), timeout=0.1)
            if not frame.done():
                frame.cancel()
                raise EngineDeadError(f"the engine process ended with status {self._ended.result()}")
            try:
                message = decode_from_engine(await frame)
            except MessageError:
                continue
            if isinstance(message, Ready):
                self._is_ready = True
                self._config = with_plan(self._config, message.info)
            return message

    def pulse(self) -> Pulse | None:
        return Pulse(0, 0) if self._directory is None else self._directory.state.pulse

    def in_work(self) -> list[str]:
        return [] if self._directory is None else self._directory.state.in_work

    def dump_stacks(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Stop the child: by a message if it is ready, by SIGKILL if it is loading or STOP_TIMEOUT has passed."""
        if self._process is not None and self._process.returncode is None:
            if self._is_ready:
                self.send(Stop())
            else:  # it reads no messages while it loads
                self._process.kill()
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
            self._directory.remove()
        self._process = self._context = self._directory = None


def process_links(config: Config, module: str = "jaxserve.engine.process") -> list[EngineLink]:
    """Return a link for each replica of a server. Raises ConfigError if there are too few devices."""
    if config.mesh.replicas == 1:
        return [ProcessLink(config, module)]
    platform = platform_of(config)
    shares = device_shares(config, platform)
    return [ProcessLink(replica_config(config, platform, i), module, share) for i, share in enumerate(shares)]
