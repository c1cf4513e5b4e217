"""Make the events of a background response durable, and follow them. Only durable events are shown to clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Container, Iterator
from typing import Any

import msgspec
import orjson

from jaxserve.api.batch.pause import StoragePause
from jaxserve.errors import StorageError
from jaxserve.store.records import ResponseRecord
from jaxserve.store.responses import ResponseStore

Json = dict[str, Any]

FIRST_EVENTS = 2  # response.created and response.queued, logged with the response itself
GROUP = 256  # events read at once
MAX_WAITING = 1024  # events that are not durable yet; the response waits if there are more


class _EventType(msgspec.Struct):
    type: str


event_type = msgspec.json.Decoder(_EventType).decode


class Followers:
    """Wakes those who follow a response whenever it may have changed."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    @contextlib.contextmanager
    def following(self, response_id: str) -> Iterator[asyncio.Event]:
        """Give an event that is set by each `wake` of this response. The caller clears it."""
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
    """Writes the events of one response, in groups: all that arrive during one commit share the next.

    If the disk is full, events wait; none is lost.
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
        """Log an event under the next number; the first events are logged already."""
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

    running: ids of the responses whose tasks run. Raises NotFoundError if the response is deleted meanwhile.
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
    """Return the final event if it is not in the log: the response was cancelled, or a crash came before the event."""
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
