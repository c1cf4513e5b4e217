"""A worker's end of the connection to the main process: the engine as an EngineLink that never dies.

If the engine dies, the main process sends the worker's requests to the next one; the worker only learns the state. If
the main process dies, the worker's process ends (see cli/serving/worker.py).
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.queue_limit import Load
from jaxserve.config import Config
from jaxserve.errors import JaxserveError
from jaxserve.transport.group import FrameStream
from jaxserve.transport.shared_state import Pulse
from jaxserve.types.messages import (
    Call,
    EngineState,
    FromEngine,
    Reply,
    RequestRefused,
    ToEngine,
    ToWorker,
    decode_to_worker,
    encode,
)

Method = Callable[..., Any]


class RelayLink:
    """Relays messages to and from the engine over the main process.

    connection: a connected socket. methods: what the main process may call; their results are plain data

    on_end: called when the main process has closed the connection
    """

    def __init__(self, connection: socket.socket, methods: Mapping[str, Method], on_end: Callable[[], None]) -> None:
        self._connection = connection
        self._methods = methods
        self._answering: set[asyncio.Task[None]] = set()
        self._messages: asyncio.Queue[ToWorker] = asyncio.Queue()
        self._stream = FrameStream(self._take, on_end)

    async def start(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._stream, sock=self._connection)

    def send(self, message: ToEngine | Reply) -> None:
        self._stream.send(encode(message))

    async def receive(self) -> FromEngine | EngineState | RequestRefused:
        while isinstance(message := await self._messages.get(), Call):
            task = asyncio.create_task(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        return message

    def _take(self, frame: bytes) -> None:
        self._messages.put_nowait(decode_to_worker(frame))

    async def _answer(self, call: Call) -> None:
        try:
            result = self._methods[call.method](**call.args)
            reply = Reply(call.call_id, result=await result if inspect.isawaitable(result) else result)
        except (JaxserveError, KeyError, TypeError) as error:
            reply = Reply(call.call_id, error=f"{call.method}: {error}")
        self.send(reply)

    def pulse(self) -> Pulse | None:
        return None

    def in_work(self) -> list[str]:
        return []

    def dump_stacks(self) -> None: ...

    def kill(self) -> None: ...

    async def stop(self) -> None:
        self._stream.close()


class WorkerEngine(AsyncEngine):
    """The engine of a worker. whole_load: reads the load of all processes, as `load` gives it for this one"""

    def __init__(self, config: Config, link: RelayLink, *, id_prefix: str, whole_load: Callable[[], Load]) -> None:
        super().__init__(config, link, id_prefix=id_prefix)
        self._whole_load = whole_load

    @property
    def load(self) -> Load:
        """The load of all processes, as the main process has last written it; at least that of this process."""
        own, whole = super().load, self._whole_load()
        return Load(max(own.num_live, whole.num_live), whole.waiting_tokens)
