"""Calls to an engine or a worker, and the record of the calls that a new engine process gets after a death.

`Calls` makes calls and waits for their replies. `ControlRecord` brings a new engine into the state in which its
operator left the old one: weights of a directory are loaded again, and the engine is paused or put to sleep again.
Weights that came as bytes are gone with the process: the new one has the weights of its start, and its weight version
says so.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

import msgspec

from jaxserve.errors import (
    ConflictError,
    HTTPError,
    InvalidValueError,
    ModelNotFoundError,
    ServerError,
    WeightsLostError,
)
from jaxserve.types.calls import (
    PAUSED,
    EngineCall,
    LoadAdapter,
    Pause,
    Resume,
    SetWeightVersion,
    Sleep,
    UnloadAdapter,
    Update,
    UpdateFromDirectory,
    UpdateFromFile,
    Wake,
    WorkerCall,
)
from jaxserve.types.messages import Call, Reply

logger = logging.getLogger(__name__)

_ERRORS: dict[int, type[HTTPError]] = {
    400: InvalidValueError,
    404: ModelNotFoundError,
    409: ConflictError,
    503: WeightsLostError,
}


C = TypeVar("C", EngineCall, WorkerCall)


class Calls(Generic[C]):
    """The calls of one engine or worker. send: sends a message to it

    num_made: calls of `make` that are not answered yet
    """

    def __init__(self, send: Callable[[Call], None]) -> None:
        self.num_made = 0
        self._send = send
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._failure: HTTPError | None = None  # why the engine takes no calls; None: it takes them
        self._ids = itertools.count()

    async def call(self, call: C) -> Any:
        """Make a call and return its result. Raises an HTTPError with the reason of the other end."""
        return await self._begin(call)

    def make(self, call: C, on_failure: Callable[[BaseException], None] | None = None) -> None:
        """Make a call without waiting for its result. A failure is logged, and given to `on_failure`."""
        self.num_made += 1
        self._begin(call).add_done_callback(functools.partial(self._answered, call.name, on_failure))

    def _answered(
        self, name: str, on_failure: Callable[[BaseException], None] | None, future: asyncio.Future[Any]
    ) -> None:
        self.num_made -= 1
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.error("%s failed in the new engine: %s", name, error)
            if on_failure is not None:
                on_failure(error)

    def _begin(self, call: C) -> asyncio.Future[Any]:
        call_id = next(self._ids)
        future = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(call_id))
        if self._failure is None:
            self._send(Call(call_id, call))
        else:  # nobody would answer: an engine that is being started again gets no earlier message
            future.set_exception(self._failure.with_traceback(None))  # without the frames of earlier calls
        return future

    def receive(self, reply: Reply) -> None:
        """Give a reply to its call. A call that was cancelled gets none."""
        future = self._waiting.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.result)
        else:
            future.set_exception(_ERRORS.get(reply.status, ServerError)(reply.error))

    def ready(self) -> None:
        """Record that the engine is ready and takes calls."""
        self._failure = None

    def fail(self, error: HTTPError) -> None:
        """End all calls with an error, also later calls until `ready`."""
        self._failure = error
        for future in [*self._waiting.values()]:
            if not future.done():
                future.set_exception(error)


class ControlRecord:
    """The state that calls have made, as the calls that make it again. num_resumed: how often the engine was resumed"""

    def __init__(self) -> None:
        self._weights: UpdateFromDirectory | None = None  # the last update that can be repeated
        self._label: str | None = None  # label given since then
        self._lost: str | None = None  # label of weights that cannot be loaded again
        self._adapters: dict[str, LoadAdapter | UnloadAdapter] = {}  # the last call of each name
        self._pause: Pause | None = None
        self._sleep: Sleep | None = None
        self._num_updates = 0
        self._num_begun = 0  # updates that were begun, failed ones included
        self.num_resumed = 0

    @property
    def has_lost(self) -> bool:
        """Whether the weights cannot be loaded again."""
        return self._lost is not None

    @property
    def asleep(self) -> frozenset[str]:
        """Names of the parts that are not on the devices of a new engine after `calls`; PAUSED if it is paused."""
        tags = frozenset() if self._sleep is None else frozenset(self._sleep.tags)
        return tags if self._pause is None else tags | {PAUSED}

    def begun_update(self, call: Update) -> Update:
        """Return the next update with a number of its own and a label.

        An engine that is started again counts from the beginning, so it cannot choose them.
        """
        self._num_begun += 1
        version = str(self._num_updates + 1) if call.version is None else call.version
        return msgspec.structs.replace(call, number=self._num_begun, version=version)

    def record(self, call: EngineCall, result: Any) -> None:
        """Record a call that has succeeded."""
        self._num_updates += call.changes_weights
        match call:
            case UpdateFromDirectory():
                self._weights = UpdateFromDirectory(path=call.path, version=result, number=call.number)
                self._label = self._lost = None
            case UpdateFromFile():
                self._weights = self._label = None
                self._lost = result
            case SetWeightVersion():
                self._label = result
            case LoadAdapter():
                self._adapters[call.adapter] = msgspec.structs.replace(call, replace=True)
            case UnloadAdapter():
                self._adapters[call.adapter] = msgspec.structs.replace(call, missing_ok=True)
            case Pause():
                self._pause = call
            case Resume():
                self._pause = None
                self.num_resumed += 1
            case Sleep():
                self._sleep = Sleep(call.level, "retract", tuple(result))
            case Wake():
                self._still_sleeps(result)
            case _:
                pass
        if call.changes_weights:  # which puts them on the devices
            self._still_sleeps(self.asleep - {"weights", PAUSED})

    def _still_sleeps(self, tags: Collection[str]) -> None:
        if self._sleep is not None:
            self._sleep = msgspec.structs.replace(self._sleep, tags=tuple(sorted(tags))) if tags else None

    def calls(self) -> list[EngineCall]:
        """Return the calls for a new engine, in order."""
        if self._lost is not None:
            logger.error("the weights %r went with the engine: it has the weights of its start", self._lost)
            self._lost = self._label = None
        label = None if self._label is None else SetWeightVersion(self._label)
        adapters = self._adapters.values()
        return [call for call in (self._weights, label, *adapters, self._pause, self._sleep) if call is not None]
