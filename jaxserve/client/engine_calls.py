"""Administrative calls to the engine that wait for their replies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from jaxserve.errors import HTTPError, InvalidValueError
from jaxserve.types.messages import Call, Reply


class EngineCalls:
    """The calls of one engine. send: sends a message to it"""

    def __init__(self, send: Callable[[Call], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()

    async def call(self, method: str, args: dict[str, Any]) -> Any:
        """Make a call and return its result. Raises InvalidValueError with the engine's reason."""
        call_id = next(self._ids)
        future = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        self._send(Call(call_id, method, args))
        try:
            return await future
        finally:
            del self._waiting[call_id]

    def take(self, reply: Reply) -> None:
        """Give a reply to its call. A call that was cancelled gets none."""
        future = self._waiting.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.result)
        else:
            future.set_exception(InvalidValueError(reply.error))

    def fail(self, error: HTTPError) -> None:
        """End all calls with an error."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
