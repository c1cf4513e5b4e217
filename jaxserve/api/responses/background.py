"""Run background responses beside online requests and batches, each in a task of its own.

They share the window of the batches, so that both together use the spare capacity and alternate. A queued response is
durable, its events are durable before clients see them, and it is stored before its client learns that it has ended.
`EventLog` and `replayed` write and read the events. `ConversationLocks` lets one response at a time change a
conversation; it is in memory, because only one server owns a store. `BackgroundRunner` runs the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import orjson
from fastapi import FastAPI

from jaxserve.api.batch.job import RequestWindow, StoragePause
from jaxserve.api.batch.request import MAX_ATTEMPTS, MAX_WAIT, READY_POLL, engine_ready
from jaxserve.api.batch.runner import BatchRunner
from jaxserve.api.http.errors import as_http_error
from jaxserve.api.responses.answer import Keeper
from jaxserve.api.responses.items import stored_output
from jaxserve.api.state import ServerState
from jaxserve.errors import (
    ConflictError,
    HTTPError,
    InvalidValueError,
    NotReadyError,
    QueueFullError,
    StorageError,
    StoreDamagedError,
)
from jaxserve.store.database import LeaseLostError
from jaxserve.store.records import NewResponse, ResponseRecord, ResponseStatus, StoredItem
from jaxserve.store.responses import ResponseStore, Whole

logger = logging.getLogger(__name__)

FIRST_EVENTS = 2  # response.created and response.queued, logged with the response itself
GROUP = 256  # events that are read at once
MAX_WAITING = 1024  # most events that are not durable yet; the response waits if there are more


class _EventType(msgspec.Struct):
    type: str


event_type = msgspec.json.Decoder(_EventType).decode


class Followers:
    """Wake the readers that follow a response whenever it may have changed."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    @contextlib.contextmanager
    def following(self, response_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that each `wake` of this response sets. The caller clears it."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault(response_id, set())
        waiting.add(event)
        try:
            yield event
        finally:
            waiting.discard(event)
            if not waiting:
                self._waiting.pop(response_id, None)

    def wake(self, response_id: str) -> None:
        for event in self._waiting.get(response_id, ()):
            event.set()


class EventLog:
    """Write the events of one response in groups: all events that arrive during one commit share the next commit.

    If the disk is full, events wait and none is lost.
    """

    def __init__(self, store: ResponseStore, response_id: str, followers: Followers, pause: StoragePause) -> None:
        self._store = store
        self._id = response_id
        self._followers = followers
        self._pause = pause
        self._next = FIRST_EVENTS
        self._waiting: list[tuple[int, bytes]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, event: Json) -> None:
        """Log an event under the next number. The first FIRST_EVENTS events are logged already."""
        if event["type"] in ("response.created", "response.queued"):
            return
        self._waiting.append((self._next, orjson.dumps(event | {"sequence_number": self._next})))
        self._next += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_all())
        if len(self._waiting) > MAX_WAITING:
            await self.flush()

    async def flush(self) -> None:
        """Return once all events are durable. Raises StoreDamagedError and LeaseLostError."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def stop(self) -> None:
        """Write nothing more."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def _write_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            while True:
                try:
                    await self._store.add_events(self._id, group)
                    break
                except StorageError as error:
                    await self._pause.wait(error)
            self._pause.end()
            self._followers.wake(self._id)


async def replayed(
    store: ResponseStore, followers: Followers, running: Container[str], response_id: str, after: int
) -> AsyncGenerator[bytes, None]:
    """Yield the JSON of each event whose number is above `after`, and follow the response until it has ended.

    running: ids of the responses whose tasks run
    Raises NotFoundError if the response is deleted during this.
    """
    seen = False
    with followers.following(response_id) as changed:
        while True:
            changed.clear()
            record, output = await store.get(response_id, owner=None)
            ended = record.status.ended and response_id not in running
            events = await store.events_after(response_id, after, GROUP)
            if not (seen or record.status.ended) and any(number >= FIRST_EVENTS for number, _ in events):
                await store.mark_seen(response_id)
                seen = True
            for number, body in events:
                after = number
                yield body
            if ended and not events:
                break
            if not events:
                await changed.wait()
    last = await _missing_end(store, record, [item.body for item in output])
    if last is not None and last[0] > after:
        yield last[1]


async def _missing_end(store: ResponseStore, record: ResponseRecord, output: list[bytes]) -> tuple[int, bytes] | None:
    """Return the final event if the log lacks it because the response was cancelled or the server crashed."""
    last = await store.last_event(record.id)
    name = f"response.{record.status}"
    if last is None or event_type(last[1]).type == name:
        return None
    event = {"type": name, "sequence_number": last[0] + 1, "response": response_object(record, output)}
    return last[0] + 1, orjson.dumps(event)


def response_object(record: ResponseRecord, output: list[bytes]) -> Json:
    """Build the Response object of a stored response."""
    items = [orjson.Fragment(item) for item in output]
    return orjson.loads(record.body) | {"status": record.status, "output": items}


class StoreKeeper:
    """Put one foreground response into the store when it has ended.

    new: the response before it has run
    release: unlocks its conversation, so that the client can continue it once it has read the final event
    """

    def __init__(self, store: ResponseStore, new: NewResponse, release: Callable[[], None]) -> None:
        self._store = store
        self.new = new
        self._release = release

    async def begin(self) -> None: ...

    async def finish(self, response: Json, output_items: list[Json]) -> None:
        """Raise StorageError if the disk refuses."""
        ended = replace(self.new, status=ResponseStatus(response["status"]), body=without_output(response))
        try:
            await self._store.insert(ended, stored_output(output_items))
        finally:
            self._release()


def without_output(response: Json) -> bytes:
    return orjson.dumps({name: value for name, value in response.items() if name != "output"})


class ConversationLocks:
    """Each conversation is locked by at most one response."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}

    def lock(self, conversation_id: str | None, response_id: str) -> Callable[[], None]:
        """Lock a conversation, if there is one, and return a function that unlocks it.

        Raises InvalidValueError if it is locked.
        """
        if conversation_id is None:
            return lambda: None
        if conversation_id in self._holders:
            message = "Another response is working on this conversation. Try again when it has ended."
            raise InvalidValueError(message, param="conversation", code="conversation_locked")
        self._holders[conversation_id] = response_id
        return lambda: self.unlock(conversation_id, response_id)

    def unlock(self, conversation_id: str | None, response_id: str) -> None:
        """Unlock a conversation if this response locked it."""
        if conversation_id is not None and self._holders.get(conversation_id) == response_id:
            del self._holders[conversation_id]


QUEUE_DELAY = 5.0  # seconds until the queue is read again after an internal error

Json = dict[str, Any]


class EventSource(Protocol):
    """A source of the events of one response."""

    def events(self) -> AsyncGenerator[Json, None]: ...


@dataclass(frozen=True, slots=True)
class StartedResponse:
    """A background response that runs next. request: the body of its request without the input"""

    record: ResponseRecord
    request: bytes
    input: list[StoredItem]


MakeAnswer = Callable[[StartedResponse, Keeper], Awaitable[EventSource]]


@dataclass(frozen=True, slots=True)
class BackgroundSettings:
    """The settings of all background responses of a server.

    make_answer: plans a response. ready: returns whether the engine accepts requests now
    """

    make_answer: MakeAnswer
    ready: Callable[[], bool]
    retry_delay: float = 1.0  # seconds before a failed write or attempt is retried; doubles each time


class ResponseGoneError(ConflictError):
    """The response was cancelled or deleted while it ran."""


class BackgroundKeeper:
    """End a running response in the store, after its events. A full disk delays the end.

    release: unlocks its conversation, so that the client can continue it once it has read the final event
    """

    def __init__(
        self,
        store: ResponseStore,
        response_id: str,
        log: EventLog | None,
        pause: StoragePause,
        release: Callable[[], None],
    ) -> None:
        self._store = store
        self._id = response_id
        self._log = log
        self._release = release
        self._pause = pause
        self.is_gone = False

    async def begin(self) -> None: ...

    async def finish(self, response: Json, output_items: list[Json]) -> None:
        """Raise ResponseGoneError."""
        if self._log is not None:
            await self._log.flush()
        status = ResponseStatus(response["status"])
        body = without_output(response)
        output = stored_output(output_items)
        while True:
            try:
                self.is_gone = not await self._store.end(self._id, status, body, output)
                break
            except StorageError as error:
                await self._pause.wait(error)
        self._pause.end()
        self._release()
        if self.is_gone:
            raise ResponseGoneError("The response was cancelled.")


class BackgroundRunner:
    """Run the background responses of `store`, each in a task of its own.

    window: limits how many responses run at once; batches share it
    """

    def __init__(
        self, store: ResponseStore, window: RequestWindow, locks: ConversationLocks, settings: BackgroundSettings
    ) -> None:
        self._store = store
        self._window = window
        self._locks = locks
        self._settings = settings
        self._followers = Followers()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued = asyncio.Event()
        self._is_starting = False  # whether a task looks for the next response in the queue, or starts it

    @property
    def num_running(self) -> int:
        """The number of responses that run, and one more if others are queued."""
        return len(self._running) + (self._is_starting or self._queued.is_set())

    async def start(self) -> None:
        """Continue or end the responses that an earlier server left, and run the queue."""
        try:
            await self._store.recover(FIRST_EVENTS)
            for conversation_id, response_id in await self._store.busy_conversations():
                self._locks.lock(conversation_id, response_id)
        except HTTPError as error:
            logger.critical("no background response can go on: %s", error.message)
            return
        self._spawn(self._run_queue())

    async def stop(self) -> None:
        """Stop every response. The next start continues or ends it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, new: NewResponse, response: Json) -> None:
        """Store a queued response. Its conversation is locked already, until the response has ended."""
        kinds = ("response.created", "response.queued")
        events = [
            (number, orjson.dumps({"type": kind, "sequence_number": number, "response": response}))
            for number, kind in enumerate(kinds)
        ]
        await self._store.insert(new, (), events if new.logged else ())
        self._queued.set()

    async def cancel(self, response_id: str, owner: str | None) -> Whole:
        """Cancel a background response as ResponseStore.cancel does, and stop it."""
        whole = await self._store.cancel(response_id, owner=owner)
        if whole[0].status is ResponseStatus.CANCELLED:
            self._stop(whole[0])
        return whole

    async def delete(self, response_id: str, owner: str | None) -> None:
        """Delete a response. If it runs, it is stopped."""
        record, _ = await self._store.get(response_id, owner=owner)
        await self._store.delete(response_id, owner=owner)
        self._stop(record)

    def events(self, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the JSON of each event above `after`: first the logged events, then the live ones."""
        return replayed(self._store, self._followers, self._running, response_id, after)

    def _stop(self, record: ResponseRecord) -> None:
        if (task := self._running.get(record.id)) is not None:
            task.cancel()
        self._locks.unlock(record.conversation_id, record.id)  # the response can add nothing any more
        self._followers.wake(record.id)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_queue(self) -> None:
        pause = StoragePause("the queue of background responses", self._settings.retry_delay)
        while True:
            try:
                await self._start_next()
                pause.end()
            except StorageError as error:
                self._is_starting = False
                await pause.wait(error)
            except (LeaseLostError, StoreDamagedError) as error:
                self._is_starting = False
                self._queued.clear()
                logger.critical("background responses stop here: %s", error.message)
                return
            except Exception:
                logger.exception("the queue of background responses goes on in %.0f s", QUEUE_DELAY)
                await asyncio.sleep(QUEUE_DELAY)

    async def _start_next(self) -> None:
        """Start the oldest queued response once the window has room; wait if there is none."""
        self._queued.clear()
        self._is_starting = True
        found = await self._store.queued(1)
        if not found:
            self._is_starting = False
            await self._queued.wait()
            return
        size = found[0].size
        await self._window.enter(size)
        try:
            started = await self._store.start(found[0].id)
        except BaseException:
            self._window.leave(size)
            raise
        if started is None:  # cancelled meanwhile
            return self._window.leave(size)
        response = StartedResponse(*started)
        task = self._running[response.record.id] = self._spawn(self._run(response))
        # Done outside the task: a task cancelled before its first step runs none of its code.
        task.add_done_callback(lambda _: self._ended(response.record, size))

    def _ended(self, record: ResponseRecord, size: int) -> None:
        self._window.leave(size)
        self._running.pop(record.id, None)
        self._locks.unlock(record.conversation_id, record.id)
        self._followers.wake(record.id)

    async def _run(self, response: StartedResponse) -> None:
        record = response.record
        pause = StoragePause(f"response {record.id}", self._settings.retry_delay)
        log = EventLog(self._store, record.id, self._followers, pause) if record.logged else None
        release = functools.partial(self._locks.unlock, record.conversation_id, record.id)
        keeper = BackgroundKeeper(self._store, record.id, log, pause, release)
        try:
            await self._answer(response, keeper, log)
            if log is not None:
                await log.flush()
        except ResponseGoneError:
            pass
        except (LeaseLostError, StoreDamagedError) as error:
            logger.critical("response %s stops here: %s", record.id, error.message)
        finally:
            if log is not None:
                log.stop()

    async def _answer(self, response: StartedResponse, keeper: BackgroundKeeper, log: EventLog | None) -> None:
        """Run a response to its end.

        An attempt that fails before the first event with a status of 500 or more is repeated, up to MAX_ATTEMPTS
        attempts in all. While the queue is full or the engine is not ready, the response waits; this is not an attempt.
        """
        attempt = 1
        while True:
            while not self._settings.ready():
                await asyncio.sleep(READY_POLL)
            try:
                return await self._attempt(response, keeper, log)
            except (QueueFullError, NotReadyError) as error:
                await asyncio.sleep(min(error.retry_after or 1.0, MAX_WAIT))
            except (ResponseGoneError, LeaseLostError, StoreDamagedError):
                raise
            except Exception as error:
                failure = as_http_error(error)
                if failure.status < 500 or attempt == MAX_ATTEMPTS:
                    return await self._fail(response, keeper, log, failure)
                await asyncio.sleep(self._settings.retry_delay * 2 ** (attempt - 1))
                attempt += 1

    async def _attempt(self, response: StartedResponse, keeper: BackgroundKeeper, log: EventLog | None) -> None:
        answer = await self._settings.make_answer(response, keeper)
        async with aclosing(answer.events()) as events:
            async for event in events:
                if keeper.is_gone:
                    return
                if log is not None:
                    await log.add(event)

    async def _fail(
        self, response: StartedResponse, keeper: BackgroundKeeper, log: EventLog | None, error: HTTPError
    ) -> None:
        """End a response that could not begin."""
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        failed = orjson.loads(response.record.body) | {
            "status": ResponseStatus.FAILED,
            "error": {"code": code, "message": error.message},
        }
        await keeper.finish(failed, [])
        if log is not None:
            await log.add({"type": "response.failed", "response": failed | {"output": []}})


@dataclass(frozen=True)
class StoredResponses:
    """The stored responses and conversations of one server."""

    store: ResponseStore
    locks: ConversationLocks
    background: BackgroundRunner


MakeAnswerOf = Callable[[StartedResponse, Keeper, ServerState, StoredResponses], Awaitable[EventSource]]


def install_responses(app: FastAPI, state: ServerState, batches: BatchRunner, make_answer: MakeAnswerOf) -> None:
    """Create the stored responses of `app`, whose background runs within `responses_running`.

    Background responses share the window of `batches`. make_answer: plans the answer of a background response
    """
    store = batches.store.responses
    locks = ConversationLocks()
    settings = BackgroundSettings(
        make_answer=lambda started, keeper: make_answer(started, keeper, state, stored),
        ready=lambda: engine_ready(state.engine.check_ready),
    )
    background = BackgroundRunner(store, batches.window, locks, settings)
    stored = app.state.responses = StoredResponses(store, locks, background)
    state.metrics.watch_gauges(lambda: {"jaxserve:background_responses_running": float(background.num_running)})


@contextlib.asynccontextmanager
async def responses_running(app: FastAPI) -> AsyncIterator[None]:
    """Run the application's background responses for as long as the context is open."""
    background = app.state.responses.background
    await background.start()
    try:
        yield
    finally:
        await background.stop()


def stored_responses(app: FastAPI) -> StoredResponses | None:
    """Return the stored responses of an application; None on a server without a store."""
    return getattr(app.state, "responses", None)
