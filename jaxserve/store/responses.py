"""Stored responses and their events: SQL of responses, and `ResponseStore`, its transactions with items.py.

Every SQL function takes the connection first and runs inside a transaction or a read. A foreground response is inserted
when it has ended. A background response is inserted with the status `queued`. `owner` as in files.py.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Callable, Sequence

from jaxserve.errors import InvalidValueError, NotFoundError, QueueFullError
from jaxserve.store import items
from jaxserve.store.database import Database
from jaxserve.store.files import OWNED
from jaxserve.store.items import (
    INPUT,
    OUTPUT,
    append_items,
    check_bytes,
    drop_items,
    get_conversation,
    insert_items,
    item_of,
    item_page,
    items_of,
)
from jaxserve.store.records import (
    EVENT_SECONDS,
    MAX_QUEUED,
    MAX_TURNS,
    RESPONSE_SECONDS,
    ConversationRecord,
    History,
    ListQuery,
    NewResponse,
    Page,
    QueuedResponse,
    ResponseRecord,
    ResponseStatus,
    StoredItem,
)

UNENDED = "status IN ('queued', 'in_progress')"
INTERRUPTED = {"code": "server_error", "message": "The server was restarted while the response was in progress."}
_COLUMNS = "id, owner, status, background, logged, conversation_id, previous_id, body"


def insert_response(
    connection: sqlite3.Connection,
    new: NewResponse,
    output: Sequence[StoredItem],
    events: Sequence[tuple[int, bytes]],
    now: int,
) -> None:
    """Insert a response with its items and first events (number, JSON). Raises QueueFullError if too many wait.

    If it continues a response that is gone by now, it is inserted all the same, because its client has its answer.
    """
    if not new.status.ended and live_count(connection) >= MAX_QUEUED:
        raise QueueFullError(f"{MAX_QUEUED} background responses wait or run. Try again later.")
    sizes = sum(item.size for item in (*new.input, *output))
    connection.execute(
        """INSERT INTO responses (id, owner, status, created_at, expires_at, ended_at, background, logged, previous_id,
               conversation_id, turns, bytes, request, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (
            *(new.id, new.owner, new.status, now, now + RESPONSE_SECONDS, now if new.status.ended else None),
            *(new.request is not None, new.logged, new.previous_id, new.conversation_id),
            *(new.history.turns + 1, sizes + (new.history.bytes if new.previous_id else 0), new.request, new.body),
        ),
    )
    insert_items(connection, new.id, INPUT, new.owner, new.input)
    insert_items(connection, new.id, OUTPUT, new.owner, output)
    add_events(connection, new.id, events)
    if new.status.ended:
        _join_conversation(connection, new.id, new.status, new.conversation_id)


def live_count(connection: sqlite3.Connection) -> int:
    return connection.execute(f"SELECT count(*) FROM responses WHERE {UNENDED}").fetchone()[0]


def _join_conversation(
    connection: sqlite3.Connection, response_id: str, status: ResponseStatus, conversation_id: str | None
) -> None:
    """Append the items of an ended response to its conversation, unless it failed or the conversation is gone."""
    if conversation_id is None or status not in (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE):
        return
    try:
        held = get_conversation(connection, conversation_id, None)
    except NotFoundError:
        return
    items = items_of(connection, response_id)
    append_items(connection, held, [item for item in items if item_of(connection, held.id, item.id) is None])


def end_response(
    connection: sqlite3.Connection,
    response_id: str,
    status: ResponseStatus,
    body: bytes,
    output: Sequence[StoredItem],
    now: int,
) -> bool:
    """End a running background response. Returns False, with nothing changed, if it has ended or is gone."""
    changed = connection.execute(
        f"""UPDATE responses SET status = ?, body = ?, ended_at = ?, request = NULL, bytes = bytes + ?
            WHERE id = ? AND {UNENDED}""",
        (status, body, now, sum(item.size for item in output), response_id),
    )
    if changed.rowcount == 0:
        return False
    record = get_response(connection, response_id, now, None)
    insert_items(connection, response_id, OUTPUT, record.owner, output)
    _join_conversation(connection, response_id, status, record.conversation_id)
    return True


def get_response(connection: sqlite3.Connection, response_id: str, now: int, owner: str | None) -> ResponseRecord:
    """Return a response. Raises NotFoundError."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM responses WHERE id = :id AND (expires_at > :now OR {UNENDED}) AND {OWNED}",
        {"id": response_id, "now": now, "owner": owner},
    ).fetchone()
    if row is None:
        raise no_such_response(response_id)
    return ResponseRecord(row[0], row[1], ResponseStatus(row[2]), bool(row[3]), bool(row[4]), *row[5:])


def no_such_response(response_id: str) -> NotFoundError:
    return NotFoundError(f"Response with id '{response_id}' not found.", param="response_id")


def whole_response(
    connection: sqlite3.Connection, response_id: str, now: int, owner: str | None
) -> tuple[ResponseRecord, list[StoredItem]]:
    """Return a response and its output. Raises NotFoundError."""
    return get_response(connection, response_id, now, owner), items_of(connection, response_id, OUTPUT)


def input_page(connection: sqlite3.Connection, response_id: str, query: ListQuery, now: int) -> Page[StoredItem]:
    """Return a page of a response's own input. Raises NotFoundError and InvalidValueError."""
    get_response(connection, response_id, now, query.owner)
    return item_page(connection, response_id, INPUT, query)


def chain_history(connection: sqlite3.Connection, response_id: str, now: int, owner: str | None) -> History:
    """Return the input and output items of a response and of all before it, oldest first.

    A response stays part of the chains that continue it after it has expired, but not after it was deleted.
    Raises InvalidValueError for a response that is unknown or running, and for a chain that is too long.
    """
    try:
        record = get_response(connection, response_id, now, owner)
    except NotFoundError:
        raise _no_previous(response_id) from None
    if not record.status.ended:
        message = f"Previous response with id '{response_id}' has not ended: its status is '{record.status}'."
        raise InvalidValueError(message, param="previous_response_id")
    if record.conversation_id is not None:
        message = f"Response '{response_id}' belongs to conversation '{record.conversation_id}'; continue that."
        raise InvalidValueError(message, param="previous_response_id")
    turns, size = connection.execute("SELECT turns, bytes FROM responses WHERE id = ?", (response_id,)).fetchone()
    if turns >= MAX_TURNS:
        message = f"The chain of responses is {turns} long; this server follows at most {MAX_TURNS}."
        raise InvalidValueError(message, param="previous_response_id")
    check_bytes(size, "previous_response_id")
    items = [item for each in _chain(connection, response_id) for item in items_of(connection, each)]
    return History(tuple(items), turns, size)


def _chain(connection: sqlite3.Connection, response_id: str) -> list[str]:
    """List the ids of a chain, oldest first. Raises InvalidValueError if one was deleted."""
    rows = connection.execute(
        """WITH RECURSIVE chain (id, previous_id) AS (
               SELECT id, previous_id FROM responses WHERE id = ?
               UNION ALL
               SELECT responses.id, responses.previous_id FROM responses JOIN chain ON responses.id = chain.previous_id
               LIMIT ?)
           SELECT id, previous_id FROM chain""",
        (response_id, MAX_TURNS),
    ).fetchall()
    if rows[-1][1] is not None:
        raise _no_previous(rows[-1][1])
    return [row[0] for row in reversed(rows)]


def _no_previous(response_id: str) -> InvalidValueError:
    message = f"Previous response with id '{response_id}' not found."
    return InvalidValueError(message, param="previous_response_id", code="previous_response_not_found")


def delete_response(connection: sqlite3.Connection, response_id: str, now: int, owner: str | None) -> None:
    """Delete a response with its items and events. Raises NotFoundError."""
    get_response(connection, response_id, now, owner)
    _drop(connection, response_id)


def _drop(connection: sqlite3.Connection, response_id: str) -> None:
    drop_items(connection, response_id)
    connection.execute("DELETE FROM response_events WHERE response_id = ?", (response_id,))
    connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))


# background responses


def queued_responses(connection: sqlite3.Connection, limit: int) -> list[QueuedResponse]:
    """List the queued responses, oldest first."""
    rows = connection.execute(
        "SELECT id, bytes + length(request) FROM responses WHERE status = 'queued' ORDER BY seq LIMIT ?", (limit,)
    )
    return [QueuedResponse(*row) for row in rows]


def busy_conversations(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """List (conversation, response) of the responses that wait or run."""
    rows = connection.execute(
        f"SELECT conversation_id, id FROM responses WHERE {UNENDED} AND conversation_id IS NOT NULL"
    )
    return rows.fetchall()


def start_response(
    connection: sqlite3.Connection, response_id: str, now: int
) -> tuple[ResponseRecord, bytes, list[StoredItem]] | None:
    """Change queued -> in_progress. Returns the response, its request and its input; None if it is not queued."""
    found = connection.execute(
        "UPDATE responses SET status = 'in_progress' WHERE id = ? AND status = 'queued' RETURNING request",
        (response_id,),
    ).fetchone()
    if found is None:
        return None
    return get_response(connection, response_id, now, None), found[0], items_of(connection, response_id, INPUT)


def requeue_response(connection: sqlite3.Connection, response_id: str, first_events: int) -> None:
    """Change in_progress -> queued: the response did not begin. Only its first events stay."""
    connection.execute("UPDATE responses SET status = 'queued' WHERE id = ? AND status = 'in_progress'", (response_id,))
    connection.execute("DELETE FROM response_events WHERE response_id = ? AND number >= ?", (response_id, first_events))


def cancel_response(
    connection: sqlite3.Connection, response_id: str, now: int, owner: str | None
) -> tuple[ResponseRecord, list[StoredItem]]:
    """Cancel a background response that has not ended.

    Raises NotFoundError, and InvalidValueError if it is not a background response.
    """
    record = get_response(connection, response_id, now, owner)
    if not record.background:
        raise InvalidValueError("Cannot cancel a synchronous response.", param="response_id")
    if not record.status.ended:
        body = json.loads(record.body) | {"status": ResponseStatus.CANCELLED}
        end_response(connection, response_id, ResponseStatus.CANCELLED, json.dumps(body).encode(), (), now)
    return whole_response(connection, response_id, now, owner)


def recover(connection: sqlite3.Connection, first_events: int, now: int) -> None:
    """Decide about the responses that an earlier server left running.

    If no client has read its events, a response is queued again. Else it failed: a second run would contradict them.
    """
    rows = connection.execute("SELECT id, seen, body FROM responses WHERE status = 'in_progress'").fetchall()
    for response_id, seen, body in rows:
        if seen:
            failed = json.loads(body) | {"status": ResponseStatus.FAILED, "error": INTERRUPTED}
            end_response(connection, response_id, ResponseStatus.FAILED, json.dumps(failed).encode(), (), now)
        else:
            requeue_response(connection, response_id, first_events)


def add_events(connection: sqlite3.Connection, response_id: str, events: Sequence[tuple[int, bytes]]) -> None:
    """Log events (number, JSON) of a response, unless it was cancelled or deleted. A number's first event stays."""
    connection.executemany(
        """INSERT INTO response_events SELECT ?, ?, ?
           WHERE EXISTS (SELECT 1 FROM responses WHERE id = ? AND status <> 'cancelled')
           ON CONFLICT DO NOTHING""",
        [(response_id, number, body, response_id) for number, body in events],
    )


def events_after(connection: sqlite3.Connection, response_id: str, number: int, limit: int) -> list[tuple[int, bytes]]:
    """Return up to `limit` events (number, JSON) after the event `number`."""
    return connection.execute(
        "SELECT number, body FROM response_events WHERE response_id = ? AND number > ? ORDER BY number LIMIT ?",
        (response_id, number, limit),
    ).fetchall()


def last_event(connection: sqlite3.Connection, response_id: str) -> tuple[int, bytes] | None:
    return connection.execute(
        "SELECT number, body FROM response_events WHERE response_id = ? ORDER BY number DESC LIMIT 1", (response_id,)
    ).fetchone()


def mark_seen(connection: sqlite3.Connection, response_id: str) -> None:
    connection.execute("UPDATE responses SET seen = 1 WHERE id = ?", (response_id,))


# housekeeping


def drop_expired(connection: sqlite3.Connection, limit: int, now: int) -> int:
    """Delete up to about `limit` expired responses that no response continues. Returns how many were deleted."""
    removed = 0
    while removed < limit:
        rows = connection.execute(
            f"""SELECT id FROM responses WHERE expires_at <= ? AND NOT {UNENDED} AND NOT EXISTS
                (SELECT 1 FROM responses AS later WHERE later.previous_id = responses.id) LIMIT ?""",
            (now, limit),
        ).fetchall()
        if not rows:
            break
        for row in rows:
            _drop(connection, row[0])
        removed += len(rows)
    return removed


def drop_events(connection: sqlite3.Connection, limit: int, now: int) -> int:
    """Delete up to `limit` events of responses that ended an hour ago. Returns how many were deleted."""
    removed = connection.execute(
        """DELETE FROM response_events WHERE rowid IN (SELECT response_events.rowid FROM responses
           JOIN response_events ON response_id = responses.id WHERE logged AND ended_at <= ? LIMIT ?)""",
        (now - EVENT_SECONDS, limit),
    ).rowcount
    if removed < limit:
        connection.execute("UPDATE responses SET logged = 0 WHERE logged AND ended_at <= ?", (now - EVENT_SECONDS,))
    return removed


SWEEP_EVENTS = 2000  # events removed in one transaction, so that no write waits long
SWEEP_RESPONSES = 50
Whole = tuple[ResponseRecord, list[StoredItem]]  # a response and its output


class ResponseStore:
    """Responses, their items and events, and conversations.

    A write is durable when it returns, and has changed nothing if it raises StorageError.

    owner: the API key that asks, "" for the default key, which sees only its own objects; None: see all
    now: returns Unix seconds

    Raises NotFoundError for unknown ids, StorageError if the disk refuses, StoreDamagedError if stored data is damaged.
    """

    def __init__(self, database: Database, now: Callable[[], int]) -> None:
        self._database = database
        self.now = now

    # what comes before a response

    async def chain(self, previous_id: str, *, owner: str | None) -> History:
        """Return the items of a response and of all before it. Raises InvalidValueError."""
        return await self._database.read(chain_history, previous_id, self.now(), owner)

    async def conversation_history(self, conversation_id: str, *, owner: str | None) -> History:
        return await self._database.read(items.conversation_history, conversation_id, owner)

    async def find_items(self, item_ids: Sequence[str], *, owner: str | None) -> dict[str, bytes]:
        """Return the bodies of the items by id. Missing items are left out."""
        return await self._database.read(items.find_items, item_ids, owner)

    # responses

    async def insert(
        self, new: NewResponse, output: Sequence[StoredItem] = (), events: Sequence[tuple[int, bytes]] = ()
    ) -> None:
        """Store a response that has ended, or a queued one with its first events (number, JSON)."""
        await self._database.write(insert_response, new, output, events, self.now())

    async def end(self, response_id: str, status: ResponseStatus, body: bytes, output: Sequence[StoredItem]) -> bool:
        """End a background response. Returns False, with nothing changed, if it has ended before or is gone."""
        return await self._database.write(end_response, response_id, status, body, output, self.now())

    async def get(self, response_id: str, *, owner: str | None) -> Whole:
        return await self._database.read(whole_response, response_id, self.now(), owner)

    async def delete(self, response_id: str, *, owner: str | None) -> None:
        await self._database.write(delete_response, response_id, self.now(), owner)

    async def cancel(self, response_id: str, *, owner: str | None) -> Whole:
        """Cancel a background response. One that has ended stays as it is. Raises InvalidValueError for others."""
        return await self._database.write(cancel_response, response_id, self.now(), owner)

    async def input_items(self, response_id: str, query: ListQuery) -> Page[StoredItem]:
        return await self._database.read(input_page, response_id, query, self.now())

    # background responses, as their runner uses them

    async def recover(self, first_events: int) -> None:
        """Queue or end the responses that an earlier server left running.

        first_events: number of events that were made by queueing
        """
        await self._database.write(recover, first_events, self.now())

    async def queued(self, limit: int) -> list[QueuedResponse]:
        return await self._database.read(queued_responses, limit)

    async def busy_conversations(self) -> list[tuple[str, str]]:
        """List (conversation, response) of the responses that wait or run."""
        return await self._database.read(busy_conversations)

    async def start(self, response_id: str) -> tuple[ResponseRecord, bytes, list[StoredItem]] | None:
        """Begin a queued response. Return it, its request and its input; None if it is not queued any more."""
        return await self._database.write(start_response, response_id, self.now())

    async def add_events(self, response_id: str, events: Sequence[tuple[int, bytes]]) -> None:
        await self._database.write(add_events, response_id, events)

    async def events_after(self, response_id: str, number: int, limit: int) -> list[tuple[int, bytes]]:
        return await self._database.read(events_after, response_id, number, limit)

    async def last_event(self, response_id: str) -> tuple[int, bytes] | None:
        return await self._database.read(last_event, response_id)

    async def mark_seen(self, response_id: str) -> None:
        """Record that a client may have read the response's events."""
        await self._database.write(mark_seen, response_id)

    # conversations

    async def create_conversation(
        self, metadata: dict[str, str], first: Sequence[StoredItem], *, owner: str
    ) -> ConversationRecord:
        new = ConversationRecord(f"conv_{secrets.token_hex(24)}", owner, self.now(), metadata, 0)
        return await self._database.write(items.insert_conversation, new, first)

    async def get_conversation(self, conversation_id: str, *, owner: str | None) -> ConversationRecord:
        return await self._database.read(items.get_conversation, conversation_id, owner)

    async def set_metadata(
        self, conversation_id: str, metadata: dict[str, str], *, owner: str | None
    ) -> ConversationRecord:
        return await self._database.write(items.set_metadata, conversation_id, metadata, owner)

    async def delete_conversation(self, conversation_id: str, *, owner: str | None) -> None:
        await self._database.write(items.delete_conversation, conversation_id, owner)

    async def add_items(self, conversation_id: str, new: Sequence[StoredItem], *, owner: str | None) -> None:
        await self._database.write(items.add_to_conversation, conversation_id, new, owner)

    async def list_items(self, conversation_id: str, query: ListQuery) -> Page[StoredItem]:
        return await self._database.read(items.conversation_page, conversation_id, query)

    async def get_item(self, conversation_id: str, item_id: str, *, owner: str | None) -> StoredItem:
        return await self._database.read(items.get_item, conversation_id, item_id, owner)

    async def delete_item(self, conversation_id: str, item_id: str, *, owner: str | None) -> ConversationRecord:
        return await self._database.write(items.delete_item, conversation_id, item_id, owner)

    # housekeeping

    async def sweep(self) -> None:
        """Remove expired responses, and the events of responses that ended an hour ago."""
        now = self.now()
        while await self._database.write(drop_events, SWEEP_EVENTS, now) == SWEEP_EVENTS:
            pass
        while await self._database.write(drop_expired, SWEEP_RESPONSES, now):
            pass
