"""Run one batch from its state in the store to a terminal state.

Each iteration of `BatchJob.run` reads the state from the store and acts on it. Nothing is kept between iterations. A
batch therefore continues after a crash, a full disk or a lost race exactly as a new batch starts.

The parts come first. `StoragePause` delays work while the store refuses writes. `ResultWriter` saves results in groups:
all results that arrive during one commit share the next commit. `RequestWindow` limits the batch requests and
background responses in flight, over all batches. A request is in flight from its start until its result is durable.
The window therefore also limits the work that a crash can lose, and the memory of results while the disk is full.
`Execution` reads the requests of one batch from its file, runs each once the window has room, and commits its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.api.batch.failure_log import FailureLog
from jaxserve.api.batch.request import READY_POLL, Handlers, RequestRunner, unexecuted_line
from jaxserve.errors import StorageError
from jaxserve.store import BATCH_LINE, BatchError, BatchRecord, BatchStatus, LineResult, Store, Validator
from jaxserve.store.jsonl import ANY_LENGTH, Line, read_lines
from jaxserve.store.validation import MAX_LINES

logger = logging.getLogger(__name__)

MAX_FACTOR = 16  # the longest delay, as a multiple of the first


class StoragePause:
    """The delay of one batch or response while the store refuses its writes. The client of a batch sees it.

    name: name of the batch or response in the log
    first_delay: seconds until the second attempt. The delay doubles up to MAX_FACTOR times that, less a random part of
      up to one half, so that the batches of a server do not all retry at once
    """

    def __init__(self, name: str, first_delay: float) -> None:
        self._name = name
        self._first_delay = first_delay
        self._factor = 1
        self._reason: str | None = None

    @property
    def error(self) -> BatchError | None:
        """The error that the Batch object shows during the delay; None if there is no delay."""
        if self._reason is None:
            return None
        return BatchError("waiting_for_storage", f"{self._reason} The batch goes on once it can be written.")

    async def wait(self, error: StorageError) -> None:
        """Return when it is time for the next attempt."""
        if self._reason is None:
            logger.warning("%s waits: %s", self._name, error.message)
        self._reason = error.message
        delay = self._first_delay * self._factor * random.uniform(0.5, 1.0)
        self._factor = min(2 * self._factor, MAX_FACTOR)
        await asyncio.sleep(delay)

    def end(self) -> None:
        """Reset the delay: the store accepted a write."""
        if self._reason is not None:
            logger.info("%s goes on", self._name)
        self._factor = 1
        self._reason = None


Waiting = list[tuple[LineResult, asyncio.Future[None]]]


class ResultWriter:
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

        Raises the errors of `save`, except StorageError, which is retried.
        """
        if self._closed:
            raise RuntimeError("a batch request finished after its batch had been stopped")
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((result, future))
        if self._task is None:
            self._task = asyncio.create_task(self._save_all(), name="batch-writer")
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
        """Accept no more results. Wait until the accepted ones are durable, or drop them after `timeout` seconds.

        Raises the error with which `save` failed, if it did.
        """
        self._closed = True
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=timeout)
            for task in late:
                task.cancel()
        if self._failure is not None:
            raise self._failure


MAX_INPUT_BYTES = 32 * 2**20  # bytes of input in flight; a larger batch request runs alone
LIMIT_POLL = 0.02  # seconds after which the limit is read again, because online load changes without notice


class RequestWindow:
    """Admit batch requests in first-in first-out order, so that batches alternate.

    limit: called repeatedly with the number in flight; returns the number that may be in flight now
    """

    def __init__(self, limit: Callable[[int], int], max_bytes: int = MAX_INPUT_BYTES) -> None:
        self.num_running = 0
        self._bytes = 0
        self._limit = limit
        self._max_bytes = max_bytes
        self._entering = asyncio.Lock()
        self._freed = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Wait until a batch request of `size` bytes fits. Pair with `leave`."""
        async with self._entering:
            while not self._fits(size):
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), LIMIT_POLL)
            self.num_running += 1
            self._bytes += size

    def leave(self, size: int) -> None:
        self.num_running -= 1
        self._bytes -= size
        self._freed.set()

    def _fits(self, size: int) -> bool:
        if self.num_running == 0:
            return True
        return self.num_running < self._limit(self.num_running) and self._bytes + size <= self._max_bytes


def spare_slots(rows: int, num_online: int) -> int:
    """Return how many batch requests fill the engine beside the online requests, less one eighth of its rows.

    The eighth stays free for the next online requests, so that each starts at once while batch requests finish.
    rows: rows of the engine that are in use. num_online: online requests now
    """
    return rows - max(1, rows // 8) - num_online


READ_LINES = 32  # batch requests read from the file at a time, in a thread


@dataclass(frozen=True, slots=True)
class Input:
    """The batch requests that are still to run."""

    path: Path
    max_line_bytes: int
    finished: set[int]

    async def requests(self) -> AsyncIterator[Line]:
        lines = (line for line in read_lines(self.path, self.max_line_bytes) if line.number not in self.finished)
        while group := await asyncio.to_thread(_take, lines):
            for line in group:
                yield line


def _take(lines: Iterator[Line]) -> list[Line]:
    return list(itertools.islice(lines, READ_LINES))


class Execution:
    """Run every request of an input, each once the window has room for it."""

    def __init__(self, left: Input, runner: RequestRunner, window: RequestWindow, writer: ResultWriter) -> None:
        self._left = left
        self._runner = runner
        self._window = window
        self._writer = writer

    async def run(self) -> None:
        """Return once every request has finished and is durable. If cancelled, cancel the requests in flight.

        Raises the first error of a request, or of saving its result.
        """
        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._left.requests():
                    await self._start(line, group)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _start(self, line: Line, group: asyncio.TaskGroup) -> None:
        assert line.data is not None, "validation refuses lines that are too long"
        size = len(line.data)
        await self._window.enter(size)
        task = group.create_task(self._run_request(line.number, line.data))
        # Done outside the task: a task cancelled before its first step runs none of its code.
        task.add_done_callback(lambda _: self._window.leave(size))

    async def _run_request(self, number: int, data: bytes) -> None:
        result = await self._runner.run(number, BATCH_LINE.decode(data))
        await self._writer.commit(result)


RUNNING_REQUESTS_SECONDS = 5.0  # seconds in which cancelled requests must end; the rest is abandoned

# the code and the message of a request that never ran, by the state of its batch
NOT_RUN = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The server's settings for all batches.

    known_model: returns whether a model name is served
    ready: returns whether the engine accepts requests now
    """

    known_model: Callable[[str], bool]
    ready: Callable[[], bool]
    max_line_bytes: int
    max_lines: int = MAX_LINES
    max_running: int = 8  # batches that may have requests in flight at once; other batches wait
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
        self.total = 0  # requests of the batch; 0 until they begin to run
        self.finished = 0  # requests whose results are durable
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
        if not settings.ready():  # the served model names are not known yet
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
        return self._store.now() >= batch.expires_at

    async def _run_requests(self, batch: BatchRecord) -> bool:
        """Run the remaining batch requests; return whether all have finished. Finished results are durable."""
        settings = self._settings
        left = Input(self._store.input_path(batch), ANY_LENGTH, await self._store.finished_lines(batch.id))
        self.total = batch.total
        self.finished = len(left.finished)
        writer = ResultWriter(self._save, self.pause)
        failures = FailureLog(batch.id)
        handler = self._handlers[batch.endpoint]
        runner = RequestRunner(handler, settings.ready, failures, settings.retry_delay, batch.owner)
        execution = asyncio.create_task(self._run_when_free(Execution(left, runner, self._window, writer)))
        leaving = True
        try:
            await self._until_stopped(execution, batch)
            leaving = False
        finally:
            await _cancel(execution)
            failures.flush()
            await writer.close(RUNNING_REQUESTS_SECONDS if leaving else None)
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
