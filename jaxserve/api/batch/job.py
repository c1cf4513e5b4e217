"""Run one batch from the state it has in the store to a terminal state.

Each iteration of the loop reads the state from the store and acts on it. Nothing is kept between iterations. A batch
therefore continues after a crash, a full disk or a lost race exactly as a new one starts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.api.batch.batch_request import READY_POLL, Handlers, RequestRunner, unexecuted_line
from jaxserve.api.batch.committer import Committer
from jaxserve.api.batch.execution import Execution, Input
from jaxserve.api.batch.failure_log import FailureLog
from jaxserve.api.batch.pause import StoragePause
from jaxserve.api.batch.request_window import RequestWindow
from jaxserve.errors import StorageError
from jaxserve.store import BatchError, BatchRecord, BatchStatus, LineResult, Store, Validator
from jaxserve.store.jsonl import ANY_LENGTH
from jaxserve.store.validation import MAX_LINES

RUNNING_REQUESTS_SECONDS = 5.0  # seconds for requests in flight to end once cancelled; the rest is abandoned

# why a request never ran, by the state of the batch: code and message
NOT_RUN = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The server's settings for all batches.

    known_model: returns whether a model name is served
    ready: returns whether the engine accepts requests now
    clock: returns Unix seconds
    """

    known_model: Callable[[str], bool]
    ready: Callable[[], bool]
    max_line_bytes: int
    max_lines: int = MAX_LINES
    max_running: int = 8  # batches that may have requests in flight at once; other batches wait
    clock: Callable[[], float] = time.time
    tick: float = 1.0  # seconds between checks of the deadline
    retry_delay: float = 1.0  # seconds before a failed write or request is retried; doubles each time


class BatchJob:
    """Run one batch. All jobs share the semaphore `running`; only its holders run batch requests."""

    def __init__(
        self,
        batch_id: str,
        store: Store,
        handlers: Handlers,
        window: RequestWindow,
        running: asyncio.Semaphore,
        settings: BatchSettings,
    ) -> None:
        self._id = batch_id
        self._store = store
        self._handlers = handlers
        self._window = window
        self._running = running
        self._settings = settings
        self._stop = asyncio.Event()
        self.total = 0  # requests; 0 until they begin to run
        self.finished = 0  # of them, durably
        self.pause = StoragePause(f"batch {batch_id}", settings.retry_delay)
        self._stages = {
            BatchStatus.VALIDATING: self._validate,
            BatchStatus.IN_PROGRESS: self._execute,
            BatchStatus.FINALIZING: functools.partial(self._publish, target=BatchStatus.COMPLETED),
            BatchStatus.CANCELLING: functools.partial(self._publish, target=BatchStatus.CANCELLED),
        }

    def stop_requests(self) -> None:
        """Cancel the requests in flight: the store says that the batch is being cancelled."""
        self._stop.set()

    async def run(self) -> BatchRecord:
        """Run the batch until it reaches a terminal state."""
        while True:
            try:
                batch = await self._store.get_batch(self._id)
                if batch.status.terminal:
                    return batch
                await self._stages[batch.status](batch)
                self.pause.end()
            except StorageError as error:
                await self.pause.wait(error)

    async def _validate(self, batch: BatchRecord) -> None:
        settings = self._settings
        if not settings.ready():  # the served model names are unknown before
            return await asyncio.sleep(min(settings.tick, READY_POLL))
        validator = Validator(batch.endpoint, settings.known_model, settings.max_line_bytes, settings.max_lines)
        try:
            found = await asyncio.to_thread(validator.run, self._store.input_path(batch))
        except FileNotFoundError:
            return await self._fail_without_input(batch)
        if found.errors:
            await self._store.fail_batch(batch.id, batch.status, found.errors)
        else:
            await self._store.start_batch(batch.id, found.total, found.model)

    async def _fail_without_input(self, batch: BatchRecord) -> None:
        error = BatchError("input_file_missing", "The input file is no longer there.", "input_file_id")
        await self._store.fail_batch(batch.id, batch.status, [error])

    async def _execute(self, batch: BatchRecord) -> None:
        try:
            finished = await self._run_requests(batch)
        except FileNotFoundError:
            return await self._fail_without_input(batch)
        if finished:
            await self._store.move_batch(batch.id, batch.status, BatchStatus.FINALIZING)
        elif self._expired(batch):
            await self._publish(batch, target=BatchStatus.EXPIRED)

    def _expired(self, batch: BatchRecord) -> bool:
        return self._settings.clock() >= batch.expires_at

    async def _run_requests(self, batch: BatchRecord) -> bool:
        """Run the remaining batch requests; return whether all have finished. Finished results are durable."""
        settings = self._settings
        left = Input(self._store.input_path(batch), ANY_LENGTH, await self._store.finished_lines(batch.id))
        self.total, self.finished = batch.total, len(left.finished)
        committer = Committer(self._save, self.pause)
        failures = FailureLog(batch.id)
        handler = self._handlers[batch.endpoint]
        runner = RequestRunner(handler, settings.ready, failures, settings.retry_delay, batch.owner)
        execution = asyncio.create_task(self._run_when_free(Execution(left, runner, self._window, committer)))
        leaving = True
        try:
            await self._until_stopped(execution, batch)
            leaving = False
        finally:
            await _cancel(execution)
            failures.flush()
            await committer.close(RUNNING_REQUESTS_SECONDS if leaving else None)
        return execution.done() and not execution.cancelled() and execution.result() is None

    async def _save(self, results: Sequence[LineResult]) -> None:
        await self._store.add_results(self._id, results)
        self.finished += len(results)

    async def _run_when_free(self, execution: Execution) -> None:
        async with self._running:
            await execution.run()

    async def _until_stopped(self, execution: asyncio.Task[None], batch: BatchRecord) -> None:
        """Return once all requests have finished, the batch is being cancelled, or its deadline has passed."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            while not (execution.done() or self._stop.is_set() or self._expired(batch)):
                waiting = (execution, stop)
                await asyncio.wait(waiting, timeout=self._settings.tick, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    async def _publish(self, batch: BatchRecord, target: BatchStatus) -> None:
        reason = NOT_RUN.get(target)
        missing = None if reason is None else functools.partial(unexecuted_line, reason=reason)
        await self._store.publish_batch(batch, target, max_line_bytes=ANY_LENGTH, missing_line=missing)


async def _cancel(execution: asyncio.Task[None]) -> None:
    if execution.done():
        return
    execution.cancel()
    await asyncio.wait({execution}, timeout=RUNNING_REQUESTS_SECONDS)
    if not execution.done():
        logger.error("requests of a batch did not end within %.0f s of being cancelled", RUNNING_REQUESTS_SECONDS)
        execution.add_done_callback(lambda task: task.cancelled() or task.exception())  # no caller awaits this task
