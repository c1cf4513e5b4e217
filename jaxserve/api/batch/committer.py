"""Making results durable in groups: all lines that finish while one commit runs share the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jaxserve.api.batch.pause import StoragePause
from jaxserve.errors import StorageError
from jaxserve.store import LineResult

Waiting = list[tuple[LineResult, asyncio.Future[None]]]


class Committer:
    """Hands results to `save`, group by group, for as long as it takes: a full disk holds lines up, it loses none."""

    def __init__(self, save: Callable[[Sequence[LineResult]], Awaitable[None]], pause: StoragePause) -> None:
        self._save = save
        self._pause = pause
        self._waiting: Waiting = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._failure: Exception | None = None

    async def commit(self, result: LineResult) -> None:
        """Return when the result is durable. A caller that gives up waiting does not take its result back.

        Raises what `save` raises, StorageError excepted.
        """
        if self._closed:
            raise RuntimeError("a line finished after its batch had been stopped")
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((result, future))
        if self._task is None:
            self._task = asyncio.create_task(self._save_all(), name="batch-committer")
        await future

    async def _save_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            try:
                await self._save_group([result for result, _ in group])
            except Exception as error:
                self._failure = error
            for _, future in group:
                if not future.done():
                    future.set_exception(self._failure) if self._failure else future.set_result(None)
        self._task = None

    async def _save_group(self, group: Sequence[LineResult]) -> None:
        while True:
            try:
                await self._save(group)
                return self._pause.end()
            except StorageError as error:
                await self._pause.wait(error)

    async def close(self, timeout: float | None) -> None:
        """Take no more results, and return when those taken are durable, or given up after `timeout` seconds."""
        self._closed = True
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=timeout)
            for task in late:
                task.cancel()
        if self._failure is not None:
            raise self._failure
