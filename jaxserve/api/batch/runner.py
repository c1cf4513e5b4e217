"""Run all batches of a server: one task for each batch, from its creation or the server's start to its end.

`install_batches` connects the runner of an application to its engine, store and routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

from fastapi import FastAPI
from starlette.requests import Request

from jaxserve.api.batch.job import BatchJob, BatchSettings, RequestWindow, spare_slots
from jaxserve.api.batch.request import Endpoint, Handlers, engine_ready, route_handlers
from jaxserve.api.body_cost import max_line_bytes
from jaxserve.api.state import EngineProtocol, ServerState
from jaxserve.errors import HTTPError, NotReadyError, StorageError, StoreDamagedError
from jaxserve.store import BatchError, BatchRecord, NewBatch, Store
from jaxserve.store.database import LeaseLostError

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0
CRASH_DELAY = 5.0  # seconds until a batch is retried after an internal error


class BatchRunner:
    """Run the batches of `store` on `handlers`.

    limit: called with the number of batch requests in flight; returns the number that may be (see RequestWindow)
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
        """Stop every batch. The next start resumes it."""
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
        """Return how many batches have not ended, without those that wait for the store."""
        return len(self._jobs) - self.num_paused()

    def num_paused(self) -> int:
        return sum(job.pause.error is not None for job in self._jobs.values())

    def progress(self) -> tuple[int, int]:
        """Return (finished requests, all requests) of the batches that run."""
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


def install_batches(app: FastAPI, state: ServerState, store: Store, endpoints: Mapping[str, Endpoint]) -> BatchRunner:
    """Create the runner of `app`, which runs within `batches_running`. endpoints: routes that requests may name"""
    settings = BatchSettings(
        known_model=state.serves,
        ready=lambda: engine_ready(state.engine.check_ready),
        max_line_bytes=max_line_bytes(state.config.server),
    )
    runner = BatchRunner(
        store, route_handlers(app, endpoints), settings, functools.partial(request_limit, state.engine)
    )
    app.state.batches = runner
    state.metrics.watch_gauges(lambda: _gauges(runner))
    return runner


def _gauges(runner: BatchRunner) -> dict[str, float]:
    finished, requests = runner.progress()
    return {
        "jaxserve:store_writable": float(runner.store.condition.status == "ok"),
        "jaxserve:batches_running": float(runner.num_running()),
        "jaxserve:batches_paused": float(runner.num_paused()),
        "jaxserve:batches_requests": float(requests),
        "jaxserve:batches_requests_finished": float(finished),
    }


def request_limit(engine: EngineProtocol, running: int) -> int:
    """Return how many batch requests the engine has room for beside the current online requests."""
    try:
        rows = min(engine.info.max_num_seqs, engine.info.useful_rows)
    except NotReadyError:
        return 0
    return spare_slots(rows, max(0, engine.num_live - running))


@contextlib.asynccontextmanager
async def batches_running(app: FastAPI) -> AsyncIterator[None]:
    """Run the application's batches for as long as the context is open."""
    runner: BatchRunner = app.state.batches
    await runner.start()
    try:
        yield
    finally:
        await runner.stop()


def batch_runner(request: Request) -> BatchRunner:
    """Return the runner of the application that answers `request`."""
    return request.app.state.batches
