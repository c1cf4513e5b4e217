"""The life of one batch, from whatever state the store has it in to a terminal one.

Each turn of the loop reads the state from the store and does what that state asks for; nothing is remembered between
turns. So a batch after a crash, after a full disk and after a lost race goes on the same way as a new one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.api.batch import lines
from jaxserve.api.batch.committer import Committer
from jaxserve.api.batch.execution import Execution, Input
from jaxserve.api.batch.failure_log import FailureLog
from jaxserve.api.batch.handlers import Handlers
from jaxserve.api.batch.lines import LineRunner, unexecuted_line
from jaxserve.api.batch.pause import StoragePause
from jaxserve.api.batch.window import Window
from jaxserve.errors import StorageError
from jaxserve.store import BatchError, BatchRecord, BatchStatus, Store, Validator
from jaxserve.store.validation import MAX_LINES

READY_POLL = 0.25  # seconds between looks at an engine that is not ready, before the lines are checked
STOP_SECONDS = 5.0  # given to lines in flight to end when told; the rest is left behind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What a server decides about its batches.

    known_model: whether a name is served; ready: whether the engine takes requests now; clock: Unix seconds
    """

    known_model: Callable[[str], bool]
    ready: Callable[[], bool]
    max_line_bytes: int
    max_lines: int = MAX_LINES
    max_running: int = 8  # batches whose lines are in flight at once; more wait their turn
    clock: Callable[[], float] = time.time
    tick: float = 1.0  # seconds between looks at the clock
    retry_delay: float = 1.0  # seconds until a disk or a line that failed is tried again; doubles


class BatchJob:
    """One batch on its way. `turn` is shared by all jobs: its holders run lines."""

    def __init__(
        self,
        batch_id: str,
        store: Store,
        handlers: Handlers,
        window: Window,
        turn: asyncio.Semaphore,
        settings: BatchSettings,
    ) -> None:
        self._id = batch_id
        self._store = store
        self._handlers = handlers
        self._window = window
        self._turn = turn
        self._settings = settings
        self._stop = asyncio.Event()
        self.pause = StoragePause(batch_id, settings.retry_delay)
        self._stages = {
            BatchStatus.VALIDATING: self._validate,
            BatchStatus.IN_PROGRESS: self._execute,
            BatchStatus.FINALIZING: functools.partial(self._publish, target=BatchStatus.COMPLETED),
            BatchStatus.CANCELLING: functools.partial(self._publish, target=BatchStatus.CANCELLED),
        }

    def stop_lines(self) -> None:
        """The batch is being cancelled in the store: end its lines now."""
        self._stop.set()

    async def run(self) -> BatchRecord:
        """Take the batch to its end."""
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
        if not settings.ready():  # the names of the models are not known before
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
            finished = await self._run_lines(batch)
        except FileNotFoundError:
            return await self._fail_without_input(batch)
        if finished:
            await self._store.move_batch(batch.id, batch.status, BatchStatus.FINALIZING)
        elif self._expired(batch):
            await self._publish(batch, target=BatchStatus.EXPIRED)

    def _expired(self, batch: BatchRecord) -> bool:
        return self._settings.clock() >= batch.expires_at

    async def _run_lines(self, batch: BatchRecord) -> bool:
        """Run what is left of the batch; whether that is all of it. What finished is durable."""
        settings = self._settings
        left = Input(self._store.input_path(batch), settings.max_line_bytes, await self._store.finished_lines(batch.id))
        committer = Committer(functools.partial(self._store.add_results, batch.id), self.pause)
        failures = FailureLog(batch.id)
        handler = self._handlers[batch.endpoint]
        runner = LineRunner(handler, settings.ready, failures, settings.retry_delay, batch.owner)
        execution = asyncio.create_task(self._in_turn(Execution(left, runner, self._window, committer)))
        leaving = True
        try:
            await self._until_stopped(execution, batch)
            leaving = False
        finally:
            await _cancel(execution)
            failures.flush()
            await committer.close(STOP_SECONDS if leaving else None)
        return execution.done() and not execution.cancelled() and execution.result() is None

    async def _in_turn(self, execution: Execution) -> None:
        async with self._turn:
            await execution.run()

    async def _until_stopped(self, execution: asyncio.Task[None], batch: BatchRecord) -> None:
        """Return when all lines have finished, the batch is being cancelled, or its time is over."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            while not (execution.done() or self._stop.is_set() or self._expired(batch)):
                waiting = (execution, stop)
                await asyncio.wait(waiting, timeout=self._settings.tick, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    async def _publish(self, batch: BatchRecord, target: BatchStatus) -> None:
        reason = {BatchStatus.EXPIRED: lines.EXPIRED, BatchStatus.CANCELLED: lines.CANCELLED}.get(target)
        missing = None if reason is None else functools.partial(unexecuted_line, reason=reason)
        await self._store.publish_batch(
            batch, target, max_line_bytes=self._settings.max_line_bytes, missing_line=missing
        )


async def _cancel(execution: asyncio.Task[None]) -> None:
    if execution.done():
        return
    execution.cancel()
    await asyncio.wait({execution}, timeout=STOP_SECONDS)
    if not execution.done():
        logger.error("lines of a batch did not end within %.0f s of being told", STOP_SECONDS)
        execution.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody waits for it
