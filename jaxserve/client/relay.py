"""The connections between the main process, which has the engine, and its workers, which serve HTTP and make text.

    worker  --Add · Abort · Reply-->  WorkerBridge  -->  AsyncEngine  -->  engine
            <--Located · Ready · EngineState · Outputs · RequestRefused · Call--

A `WorkerBridge` is the main process's end of the connection to one worker. A worker's requests become live sequences of
the main process's AsyncEngine, which sends them again to a new engine. Their tokens go to the worker as they are. Of
the engine's statistics a worker gets the loaded adapters only, which are names of models.

A `RelayLink` is the worker's end: an EngineLink to an engine that never dies. If the engine dies, the main process
sends the worker's requests to the next one, and the worker only learns the state. If the main process dies, the
worker's process ends (see cli/worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.client.async_engine import AsyncEngine, Load
from jaxserve.client.control import Calls
from jaxserve.client.sequences import LiveSequence
from jaxserve.config import Config
from jaxserve.errors import EngineDeadError, HTTPError, InvalidValueError, JaxserveError
from jaxserve.transport.child import MAX_CHILD_FRAME
from jaxserve.transport.group import FrameStream
from jaxserve.transport.shared_state import Pulse
from jaxserve.types.calls import WorkerCall
from jaxserve.types.messages import (
    Abort,
    AdapterStatus,
    Add,
    Call,
    EngineInfo,
    EngineState,
    EngineStats,
    FromEngine,
    Located,
    MessageError,
    Outputs,
    Ready,
    Reply,
    RequestRefused,
    ToEngine,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from jaxserve.types.sampling import EngineRequest
from jaxserve.types.step import TokenOutput

TELL_INTERVAL = 1.0  # seconds; an engine that is started again has its adapters some time after it is ready

logger = logging.getLogger(__name__)


class RelayedTokens:
    """The tokens of a sequence whose text the worker makes. Stands in for SequenceText."""

    thinks_too_long = False
    stopped_by_text = False

    def __init__(self, index: int, token_ids: list[int]) -> None:
        self.index = index
        self.output_token_ids = list(token_ids)

    def push(self, output: TokenOutput) -> TokenOutput:
        self.output_token_ids += output.token_ids
        return output

    def end_thinking(self) -> TokenOutput:
        """Raise NotImplementedError: the thinking of a relayed sequence has no bound here."""
        raise NotImplementedError("the worker counts the thinking's tokens")


class RelayedOutputs:
    """The outputs of one sequence on their way to its worker. Stands in for OutputQueue."""

    __slots__ = ("_bridge", "_worker_id")

    def __init__(self, bridge: WorkerBridge, worker_id: str) -> None:
        self._bridge = bridge
        self._worker_id = worker_id

    def put(self, item: TokenOutput | HTTPError) -> None:
        self._bridge.deliver(self._worker_id, item)


class WorkerBridge:
    """The requests of one worker in one engine. closed: set when the worker has closed the connection or died"""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._stream = FrameStream(self._take, self._ended)
        self._calls: Calls[WorkerCall] = Calls(self._send)
        self._numbers = itertools.count()  # choices of a request may come one by one, so they are not counted within it
        self._sequences: dict[str, LiveSequence] = {}  # by the engine id that the worker made
        self._outputs: list[TokenOutput] = []  # for the next frame
        self._told: tuple[Located | None, EngineInfo | None, EngineState | None] = (None, None, None)
        self._adapters: list[AdapterStatus] = []  # those that the worker knows
        self.closed = asyncio.Event()

    async def connect(self, connection: socket.socket) -> None:
        """Serve the worker behind a connected socket."""
        await asyncio.get_running_loop().create_connection(lambda: self._stream, sock=connection)

    @property
    def num_live(self) -> int:
        return len(self._sequences)

    def close(self) -> None:
        self._stream.close()

    async def call(self, call: WorkerCall) -> Any:
        """Call the worker and return its result. Raises InvalidValueError, or EngineDeadError if it dies meanwhile."""
        if self.closed.is_set():
            raise EngineDeadError("the worker has ended")
        return await self._calls.call(call)

    def tell(
        self,
        located: Located | None,
        info: EngineInfo | None,
        state: EngineState,
        adapters: Sequence[AdapterStatus] = (),
    ) -> None:
        """Send the worker the news of the engine."""
        told, self._told = self._told, (located, info, state)
        if located is not None and located != told[0]:
            self._send(located)
        loaded = [msgspec.structs.replace(each, num_running=0, num_waiting=0) for each in adapters]
        if loaded != self._adapters:
            self._adapters = loaded
            self._send(Outputs([], EngineStats(adapters=loaded)))
        is_new = info is not None and not _is_known(info, told[1])
        if info is not None and is_new:
            self._send(Ready(info))
        if is_new or state != told[2]:
            self._send(state)

    def deliver(self, worker_id: str, item: TokenOutput | HTTPError) -> None:
        """Send an output, or the error that ends a sequence."""
        if isinstance(item, HTTPError):
            self._sequences.pop(worker_id, None)
            self._flush()
            self._send(RequestRefused.of(worker_id, item))
            return
        if item.finish_reason is not None:
            self._sequences.pop(worker_id, None)
        if item.request_id != worker_id:  # it was sent to the engine again under another id
            item = msgspec.structs.replace(item, request_id=worker_id)
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(item)

    def _flush(self) -> None:
        """Send the outputs that the engine's latest message brought, as one frame."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._send_outputs(outputs)

    def _send_outputs(self, outputs: list[TokenOutput]) -> None:
        """Send outputs as one frame, or as several if the worker would refuse it and end."""
        body = encode(Outputs(outputs))
        if len(body) <= MAX_CHILD_FRAME:
            self._stream.send(body)
        elif len(outputs) > 1:
            half = len(outputs) // 2
            self._send_outputs(outputs[:half])
            self._send_outputs(outputs[half:])
        else:
            self._refuse(outputs[0].request_id, len(body))

    def _refuse(self, worker_id: str, size: int) -> None:
        if (sequence := self._sequences.pop(worker_id, None)) is not None:
            self._engine.abort_sequences([sequence])
        error = InvalidValueError(f"one output has {size} bytes; a worker process takes at most {MAX_CHILD_FRAME}")
        self._send(RequestRefused.of(worker_id, error))

    def _send(self, message: ToWorker) -> None:
        self._stream.send(encode(message))

    def _take(self, frame: bytes) -> None:
        try:
            message = decode_from_worker(frame)
        except MessageError as error:
            logger.error("a worker's frame is dropped: %s", error)
            return
        match message:
            case Add():
                self._add(message)
            case Abort(ids):
                self._engine.abort_sequences(each for id in ids if (each := self._sequences.get(id)) is not None)
            case Reply():
                self._calls.receive(message)

    def _add(self, message: Add) -> None:
        requests = message.requests()
        sequences = [self._sequence(request) for request in requests]
        try:
            self._engine.submit(sequences, message)
        except HTTPError as error:
            for request in requests:
                self._send(RequestRefused.of(request.request_id, error))
            return
        self._sequences |= {sequence.engine_id: sequence for sequence in sequences}

    def _sequence(self, request: EngineRequest) -> LiveSequence:
        tokens = RelayedTokens(next(self._numbers), request.resumed_token_ids)
        outputs = RelayedOutputs(self, request.request_id)
        return LiveSequence(request, tokens, outputs, is_answered=request.is_answered)

    def _ended(self) -> None:
        self.closed.set()
        left = list(self._sequences.values())
        self._sequences = {}
        self._engine.abort_sequences(left)
        self._calls.fail(EngineDeadError("the worker ended"))


class WorkerBridges:
    """The bridges to all workers of one engine. `run` tells them about its state and its adapters."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._bridges: list[WorkerBridge] = []

    @property
    def open(self) -> list[WorkerBridge]:
        self._bridges = [bridge for bridge in self._bridges if not bridge.closed.is_set()]
        return self._bridges

    async def connect(self, connection: socket.socket) -> WorkerBridge:
        """Serve the worker behind a connected socket."""
        bridge = WorkerBridge(self._engine)
        await bridge.connect(connection)
        self._tell(bridge)
        self._bridges.append(bridge)
        return bridge

    async def run(self) -> None:
        """Tell every worker of every change of the engine's state, and each second of its adapters."""
        while True:
            self.tell()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.next_status(), TELL_INTERVAL)

    def tell(self) -> None:
        """Send every worker what it does not know yet. A call that is made afterwards is answered after it was read."""
        for bridge in self.open:
            self._tell(bridge)

    def _tell(self, bridge: WorkerBridge) -> None:
        status = self._engine.status
        info = self._engine.info if self._engine.was_ready else None
        state = EngineState(status.phase, status.detail)
        bridge.tell(self._engine.located, info, state, self._engine.stats().adapters)


def _is_known(info: EngineInfo, sent: EngineInfo | None) -> bool:
    """Return whether a worker that was sent `sent` knows these properties: all but the measured rows, for batches."""
    return sent is not None and info == msgspec.structs.replace(sent, useful_rows=info.useful_rows)


Methods = Mapping[type[WorkerCall], Callable[[Any], Any]]


class RelayLink:
    """Relays messages to and from the engine over the main process.

    connection: a connected socket. methods: carry out the calls of the main process; their results are plain data
    on_end: called when the main process has closed the connection
    """

    def __init__(self, connection: socket.socket, methods: Methods, on_end: Callable[[], None]) -> None:
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

    async def _answer(self, message: Call) -> None:
        call = message.call
        try:
            if not isinstance(call, WorkerCall):
                raise InvalidValueError("this is no call to a worker")
            result = self._methods[type(call)](call)
            reply = Reply(message.call_id, result=await result if inspect.isawaitable(result) else result)
        except JaxserveError as error:
            reply = Reply(message.call_id, error=f"{call.name}: {error}")
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
    """The engine of a worker. whole_load: returns the load of all processes, as `load` does for this one"""

    def __init__(self, config: Config, link: RelayLink, *, id_prefix: str, whole_load: Callable[[], Load]) -> None:
        super().__init__(config, link, id_prefix=id_prefix)
        self._whole_load = whole_load

    @property
    def load(self) -> Load:
        """The load of all processes as the main process last wrote it, or this process's own load if that is more."""
        own = super().load
        whole = self._whole_load()
        return Load(max(own.num_live, whole.num_live), whole.waiting_tokens)
