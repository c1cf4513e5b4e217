"""Save results in groups: all results that arrive while one commit runs share the next commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jaxserve.api.batch.pause import StoragePause
from jaxserve.errors import StorageError
from jaxserve.store import LineResult

Waiting = list[tuple[LineResult, asyncio.Future[None]]]


class Committer:
    """Pass results to `save`, group by group. If the disk is full, results wait; none is lost."""

    def __init__(self, save: Callable[[Sequence[LineResult]], Awaitable[None]], pause: StoragePause) -> None:
        self._save = save
        self._pause = pause
        self._waiting: Waiting = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._failure: Exception | None = None

    async def commit(self, result: LineResult) -> None:
        """Return once the result is durable. If the caller stops waiting, the result is still saved.

        Raises what `save` raises, except StorageError, which is retried.
        """
        if self._closed:
            raise RuntimeError("a batch request finished after its batch had been stopped")
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
        """Accept no more results and wait until those accepted are durable, or dropped after `timeout` seconds.

        Raises the error with which `save` failed, if it did.
        """
        self._closed = True
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=timeout)
            for task in late:
                task.cancel()
        if self._failure is not None:
            raise self._failure
