"""Run all batches of a server: one task per batch, from its creation or the server's start to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from jaxserve.api.batch.batch_request import Handlers
from jaxserve.api.batch.job import BatchJob, BatchSettings
from jaxserve.api.batch.request_window import RequestWindow
from jaxserve.errors import HTTPError, StorageError, StoreDamagedError
from jaxserve.store import BatchError, BatchRecord, NewBatch, Store
from jaxserve.store.database import LeaseLostError

SWEEP_SECONDS = 60.0
CRASH_DELAY = 5.0  # seconds until a batch is retried after an internal error

logger = logging.getLogger(__name__)


class BatchRunner:
    """Run the batches of `store` on `handlers`.

    limit: returns how many batch requests may be in flight, given how many are (see RequestWindow)
    """

    def __init__(self, store: Store, handlers: Handlers, settings: BatchSettings, limit: Callable[[int], int]) -> None:
        self.store = store
        self.handlers = handlers
        self.window = RequestWindow(limit)
        self._settings = settings
        self._running = asyncio.Semaphore(settings.max_running)
        self._jobs: dict[str, BatchJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Resume every batch that has not ended."""
        try:
            for batch_id in await self.store.live_batches():
                self._add(batch_id)
        except HTTPError as error:
            logger.critical("no batch can go on: %s", error.message)
        self._spawn(self._sweep_forever())

    async def stop(self) -> None:
        """Stop every batch as it is; the next start resumes it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(
        self, new: NewBatch, idempotency: tuple[str, bytes] | None, reply: Callable[[BatchRecord], bytes]
    ) -> bytes:
        """Create a batch and start it. Arguments as in Store.create_batch."""
        answer, record = await self.store.create_batch(new, idempotency=idempotency, reply=reply)
        if record is not None:
            self._add(record.id)
        return answer

    async def cancel(self, batch_id: str, owner: str | None = None) -> BatchRecord:
        """Cancel a batch as Store.cancel_batch does, and stop its requests before returning."""
        record = await self.store.cancel_batch(batch_id, owner=owner)
        if (job := self._jobs.get(batch_id)) is not None:
            job.stop_requests()
        return record

    def pause_of(self, batch_id: str) -> BatchError | None:
        """Return the error that delays a batch, if the store delays it."""
        job = self._jobs.get(batch_id)
        return None if job is None else job.pause.error

    def num_running(self) -> int:
        """Return how many batches have not ended, in whatever state, without those that wait for the store."""
        return len(self._jobs) - self.num_paused()

    def num_paused(self) -> int:
        return sum(job.pause.error is not None for job in self._jobs.values())

    def progress(self) -> tuple[int, int]:
        """Return how many requests of the batches that run are finished, and how many they have."""
        jobs = self._jobs.values()
        return sum(job.finished for job in jobs), sum(job.total for job in jobs)

    def _add(self, batch_id: str) -> None:
        job = BatchJob(batch_id, self.store, self.handlers, self.window, self._running, self._settings)
        self._jobs[batch_id] = job
        self._spawn(self._run(batch_id, job))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch_id: str, job: BatchJob) -> None:
        while True:
            try:
                batch = await job.run()
                break
            except (LeaseLostError, StoreDamagedError) as error:
                logger.critical("batch %s stops here: %s", batch_id, error.message)
                del self._jobs[batch_id]
                return
            except Exception:
                logger.exception("batch %s met an unexpected error and goes on in %.0f s", batch_id, CRASH_DELAY)
                await asyncio.sleep(CRASH_DELAY)
        del self._jobs[batch_id]
        counts = f"{batch.completed} completed, {batch.failed} failed of {batch.total}"
        logger.info("batch %s is %s: %s", batch_id, batch.status, counts)
        await self._sweep()

    async def _sweep_forever(self) -> None:
        while True:
            await self._sweep()
            await asyncio.sleep(SWEEP_SECONDS)

    async def _sweep(self) -> None:
        try:
            await self.store.sweep()
        except (StorageError, StoreDamagedError):
            return  # the store has already logged it
        except HTTPError as error:
            logger.critical("the store cannot be swept: %s", error.message)
