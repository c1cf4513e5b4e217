"""The API process's end of the transport to an engine in a child process behind private sockets.

Owns the child process, its directory and its sockets. Does not interpret messages. No jax here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import Protocol

import zmq
import zmq.asyncio

from jaxserve.client.processes.device_share import DeviceShare, device_shares, replica_config
from jaxserve.client.processes.roles import check_roles
from jaxserve.config import Config
from jaxserve.errors import EngineDeadError
from jaxserve.system import platform_of
from jaxserve.transport.child import ENGINE_MODULE, EngineChild
from jaxserve.transport.shared_state import Pulse
from jaxserve.transport.socket_directory import SHARED_MEMORY, sweep
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
        """Return the ids of the requests that the engine computes or receives, or did when it died; [] if unknown."""
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
    """An engine in a child process. module: what the child runs. share: the devices that it may use

    child: one that runs already; None: `start` starts the first one too
    """

    def __init__(
        self,
        config: Config,
        module: str = ENGINE_MODULE,
        share: DeviceShare | None = None,
        child: EngineChild | None = None,
    ) -> None:
        self._config = config
        self._module = module
        self._share = share or DeviceShare()
        self._child: EngineChild | None = None
        self._next = child
        self._context: zmq.asyncio.Context | None = None
        self._ended: asyncio.Future[int] | None = None
        self._is_ready = False
        self._has_swept = False

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the child process with new sockets. An earlier child is stopped first."""
        await self.stop()
        self._sweep()
        self._is_ready = False
        self._child, self._next = self._next or self._new_child(), None
        self._ended = self._child.ended()
        self._context = zmq.asyncio.Context()
        self._outgoing = self._bind(self._context, zmq.PUSH, "to-engine")
        self._incoming = self._bind(self._context, zmq.PULL, "from-engine")

    def _new_child(self) -> EngineChild:
        config = self._config.without_secrets().model_dump_json()
        share = self._share
        return EngineChild(
            self._module, config, environment=share.environment, cores=share.cores, niceness=share.niceness
        )

    def _sweep(self) -> None:
        if not self._has_swept:
            self._has_swept = True
            if swept := [*sweep(), *sweep(SHARED_MEMORY)]:  # where pages of prompts are passed on
                logger.info("removed %d directories of killed servers", len(swept))

    def _bind(self, context: zmq.asyncio.Context, kind: int, name: str) -> zmq.asyncio.Socket:
        assert self._child is not None
        socket = context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{self._child.directory.path}/{name}")
        return socket

    def send(self, message: ToEngine) -> None:
        if self._child is None or not self._child.is_running:
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
        return Pulse(0, 0) if self._child is None else self._child.directory.state.pulse

    def in_work(self) -> list[str]:
        return [] if self._child is None else self._child.directory.state.in_work

    def dump_stacks(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the child: by a message if it is ready, by SIGKILL if it is loading or STOP_TIMEOUT has passed."""
        if self._child is not None and self._ended is not None:
            if self._is_ready:
                self.send(Stop())
            else:  # it reads no messages while it loads
                self.kill()
            await asyncio.wait((self._ended,), timeout=STOP_TIMEOUT)
            if not self._ended.done():
                self.kill()
                await self._ended
        self._close()

    def _close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._child is not None:
            self._child.close()
        self._child = self._context = None


def process_links(config: Config, module: str = ENGINE_MODULE) -> list[EngineLink]:
    """Return a link for each replica of a server. Raises ConfigError if there are too few devices."""
    if config.mesh.replicas == 1:
        return [ProcessLink(config, module)]
    check_roles(config)
    platform = platform_of(config)
    shares = device_shares(config, platform)
    return [ProcessLink(replica_config(config, platform, i), module, share) for i, share in enumerate(shares)]
