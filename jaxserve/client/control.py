"""Administrative calls to an engine, and the record of the calls that a new engine process gets after a death.

`EngineCalls` makes calls and waits for their replies. `ControlRecord` brings a new engine into the state in which its
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
from typing import Any

from jaxserve.errors import ConflictError, HTTPError, InvalidValueError, ServerError, WeightsLostError
from jaxserve.types.messages import Call, Reply

logger = logging.getLogger(__name__)

_ERRORS: dict[int, type[HTTPError]] = {400: InvalidValueError, 409: ConflictError, 503: WeightsLostError}


def changes_weights(method: str) -> bool:
    return method.startswith("update_from_")


class EngineCalls:
    """The calls of one engine. send: sends a message to it"""

    def __init__(self, send: Callable[[Call], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._failure: HTTPError | None = None  # why the engine takes no calls; None: it takes them
        self._ids = itertools.count()

    async def call(self, method: str, args: dict[str, Any]) -> Any:
        """Make a call and return its result. Raises an HTTPError with the engine's reason."""
        return await self._begin(method, args)

    def make(
        self, method: str, args: dict[str, Any], on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        """Make a call without waiting for its result. A failure is logged, and given to `on_failure`."""
        self._begin(method, args).add_done_callback(functools.partial(_log_failure, method, on_failure))

    def _begin(self, method: str, args: dict[str, Any]) -> asyncio.Future[Any]:
        call_id = next(self._ids)
        future = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(call_id))
        if self._failure is None:
            self._send(Call(call_id, method, args))
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


def _log_failure(method: str, on_failure: Callable[[BaseException], None] | None, future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("%s failed in the new engine: %s", method, error)
        if on_failure is not None:
            on_failure(error)


RecordedCall = tuple[str, dict[str, Any]]

PAUSED = "scheduling"  # vLLM's name for it, beside the names of the parts that sleep


class ControlRecord:
    """The state that calls of engine/control.py have made. num_resumed: how often the engine was resumed"""

    def __init__(self) -> None:
        self._weights: RecordedCall | None = None  # the last update that can be repeated
        self._label: str | None = None  # label given since then
        self._lost: str | None = None  # label of weights that cannot be loaded again
        self._mode: str | None = None  # how the engine is paused
        self._sleep: dict[str, Any] | None = None
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
        tags = frozenset() if self._sleep is None else frozenset(self._sleep["tags"])
        return tags if self._mode is None else tags | {PAUSED}

    def begun_update(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the next update, with a number of its own and a label.

        An engine that is started again counts from the beginning, so it cannot choose them.
        """
        self._num_begun += 1
        own = {"number": self._num_begun}
        return args | own | ({"version": str(self._num_updates + 1)} if args.get("version") is None else {})

    def record(self, method: str, args: dict[str, Any], result: Any) -> None:
        """Record a call that has succeeded."""
        self._num_updates += changes_weights(method)
        match method:
            case "update_from_directory":
                self._weights = method, {"path": args["path"], "version": result, "number": args["number"]}
                self._label = self._lost = None
            case "update_from_file":
                self._weights = self._label = None
                self._lost = result
            case "set_weight_version":
                self._label = result
            case "pause":
                self._mode = args.get("mode", "abort")
            case "resume":
                self._mode = None
                self.num_resumed += 1
            case "sleep":
                self._sleep = {"level": args.get("level", 1), "tags": result}
            case "wake":
                self._still_sleeps(result)
        if changes_weights(method):  # which puts them on the devices
            self._still_sleeps(self.asleep - {"weights", PAUSED})

    def _still_sleeps(self, tags: Collection[str]) -> None:
        if self._sleep is not None:
            self._sleep = self._sleep | {"tags": sorted(tags)} if tags else None

    def calls(self) -> list[RecordedCall]:
        """Return the calls for a new engine, in order."""
        if self._lost is not None:
            logger.error("the weights %r went with the engine: it has the weights of its start", self._lost)
            self._lost = self._label = None
        found = [self._weights] if self._weights is not None else []
        if self._label is not None:
            found.append(("set_weight_version", {"version": self._label}))
        if self._mode is not None:
            found.append(("pause", {"mode": self._mode}))
        if self._sleep is not None:
            found.append(("sleep", self._sleep | {"mode": "retract"}))
        return found
