"""Stored responses and conversations: transactions over responses.py and items.py."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from jaxserve.store import items, responses
from jaxserve.store.records import ListQuery, Page
from jaxserve.store.response_records import (
    ConversationRecord,
    History,
    NewResponse,
    QueuedResponse,
    ResponseRecord,
    ResponseStatus,
    StoredItem,
)
from jaxserve.store.sqlite.database import Database

SWEEP_EVENTS = 2000  # removed in one transaction, so that no write waits long
SWEEP_RESPONSES = 50
Whole = tuple[ResponseRecord, list[StoredItem]]  # a response and its output


class ResponseStore:
    """Responses, their items and events, and conversations.

    A write is durable when it returns, and has changed nothing if it raises StorageError.

    owner: the API key that asks, "" for the default key. It sees only its own objects; None sees all.
    now: returns Unix seconds

    Raises NotFoundError for unknown ids, StorageError if the disk refuses, StoreDamagedError if stored data is damaged.
    """

    def __init__(self, database: Database, now: Callable[[], int]) -> None:
        self._database = database
        self.now = now

    # what comes before a response

    async def chain(self, previous_id: str, *, owner: str | None) -> History:
        """Return the items of a response and of all before it. Raises InvalidValueError."""
        return await self._database.read(responses.chain_history, previous_id, self.now(), owner)

    async def conversation_history(self, conversation_id: str, *, owner: str | None) -> History:
        return await self._database.read(items.conversation_history, conversation_id, owner)

    async def find_items(self, item_ids: Sequence[str], *, owner: str | None) -> dict[str, bytes]:
        """Return the bodies of the items that there are, by id."""
        return await self._database.read(items.find_items, item_ids, owner)

    # responses

    async def insert(
        self, new: NewResponse, output: Sequence[StoredItem] = (), events: Sequence[tuple[int, bytes]] = ()
    ) -> None:
        """Store a response that has ended, or a queued one with its first events (number, JSON)."""
        await self._database.write(responses.insert_response, new, output, events, self.now())

    async def end(self, response_id: str, status: ResponseStatus, body: bytes, output: Sequence[StoredItem]) -> bool:
        """End a background response. Returns False, with nothing changed, if it has ended before or is gone."""
        return await self._database.write(responses.end_response, response_id, status, body, output, self.now())

    async def get(self, response_id: str, *, owner: str | None) -> Whole:
        return await self._database.read(responses.whole_response, response_id, self.now(), owner)

    async def delete(self, response_id: str, *, owner: str | None) -> None:
        await self._database.write(responses.delete_response, response_id, self.now(), owner)

    async def cancel(self, response_id: str, *, owner: str | None) -> Whole:
        """Cancel a background response. One that has ended stays as it is. Raises InvalidValueError for others."""
        return await self._database.write(responses.cancel_response, response_id, self.now(), owner)

    async def input_items(self, response_id: str, query: ListQuery) -> Page[StoredItem]:
        return await self._database.read(responses.input_page, response_id, query, self.now())

    # background responses, as their runner uses them

    async def recover(self, first_events: int) -> None:
        """Queue or end what an earlier server left running. first_events: so many events are of the queueing."""
        await self._database.write(responses.recover, first_events, self.now())

    async def queued(self, limit: int) -> list[QueuedResponse]:
        return await self._database.read(responses.queued_responses, limit)

    async def busy_conversations(self) -> list[tuple[str, str]]:
        """List (conversation, response) of the responses that wait or run."""
        return await self._database.read(responses.busy_conversations)

    async def start(self, response_id: str) -> tuple[ResponseRecord, bytes, list[StoredItem]] | None:
        """Begin a queued response: the response, its request and its input. None if it is not queued any more."""
        return await self._database.write(responses.start_response, response_id, self.now())

    async def add_events(self, response_id: str, events: Sequence[tuple[int, bytes]]) -> None:
        await self._database.write(responses.add_events, response_id, events)

    async def events_after(self, response_id: str, number: int, limit: int) -> list[tuple[int, bytes]]:
        return await self._database.read(responses.events_after, response_id, number, limit)

    async def last_event(self, response_id: str) -> tuple[int, bytes] | None:
        return await self._database.read(responses.last_event, response_id)

    async def mark_seen(self, response_id: str) -> None:
        """Record that a client may have read the response's events."""
        await self._database.write(responses.mark_seen, response_id)

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
        """Remove expired responses, and the events of those that ended an hour ago."""
        now = self.now()
        while await self._database.write(responses.drop_events, SWEEP_EVENTS, now) == SWEEP_EVENTS:
            pass
        while await self._database.write(responses.drop_expired, SWEEP_RESPONSES, now):
            pass
