"""Administrative calls to the engine that wait for their replies."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

from jaxserve.errors import ConflictError, HTTPError, InvalidValueError, ServerError, WeightsLostError
from jaxserve.types.messages import Call, Reply

_ERRORS: dict[int, type[HTTPError]] = {400: InvalidValueError, 409: ConflictError, 503: WeightsLostError}

logger = logging.getLogger(__name__)


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
        else:  # nobody would answer: an engine that is being started again gets no message from before
            future.set_exception(self._failure.with_traceback(None))  # not with the frames of calls before
        return future

    def take(self, reply: Reply) -> None:
        """Give a reply to its call. A call that was cancelled gets none."""
        future = self._waiting.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.result)
        else:
            future.set_exception(_ERRORS.get(reply.status, ServerError)(reply.error))

    def ready(self) -> None:
        """Note that the engine is ready and takes calls."""
        self._failure = None

    def fail(self, error: HTTPError) -> None:
        """End all calls with an error, and those that are made until `ready`."""
        self._failure = error
        for future in [*self._waiting.values()]:
            if not future.done():
                future.set_exception(error)


def _log_failure(method: str, on_failure: Callable[[BaseException], None] | None, future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("%s failed in the new engine: %s", method, error)
        if on_failure is not None:
            on_failure(error)
