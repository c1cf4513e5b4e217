"""SQL of items and conversations. Every function takes the connection first and runs inside a transaction or a read.

An item has a holder: a response, with its input and its output, or a conversation. `owner` as in files.py.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence

from jaxserve.errors import InvalidValueError, NotFoundError, StoreDamagedError
from jaxserve.store.database import DAMAGED
from jaxserve.store.files import OWNED
from jaxserve.store.records import MAX_HISTORY_BYTES, ConversationRecord, History, ListQuery, Page, StoredItem

INPUT, OUTPUT, ITEM = "input", "output", "item"
_COLUMNS = "id, owner, created_at, metadata, bytes"


def insert_items(
    connection: sqlite3.Connection, holder: str, side: str, owner: str, items: Iterable[StoredItem]
) -> None:
    connection.executemany(
        "INSERT INTO items (holder, side, id, owner, body) VALUES (?, ?, ?, ?, ?)",
        [(holder, side, item.id, owner, item.body) for item in items],
    )


def items_of(connection: sqlite3.Connection, holder: str, side: str | None = None) -> list[StoredItem]:
    """List the items of a holder, in order; for a response with no `side` its input, then its output."""
    rows = connection.execute(
        "SELECT id, body FROM items WHERE holder = :holder AND (:side IS NULL OR side = :side) ORDER BY seq",
        {"holder": holder, "side": side},
    )
    return [StoredItem(*row) for row in rows]


def item_page(connection: sqlite3.Connection, holder: str, side: str, query: ListQuery) -> Page[StoredItem]:
    """Return a page of a holder's items. Raises InvalidValueError if `query.after` is not the id of one of them."""
    bound = {"holder": holder, "side": side, "limit": query.limit + 1}
    where = "holder = :holder AND side = :side"
    if query.after is not None:
        bound["cursor"] = _place(connection, holder, side, query.after)
        where += f" AND seq {'>' if query.ascending else '<'} :cursor"
    order = "ASC" if query.ascending else "DESC"
    rows = connection.execute(f"SELECT id, body FROM items WHERE {where} ORDER BY seq {order} LIMIT :limit", bound)
    found = [StoredItem(*row) for row in rows]
    return Page(found[: query.limit], has_more=len(found) > query.limit)


def _place(connection: sqlite3.Connection, holder: str, side: str, item_id: str) -> int:
    row = connection.execute(
        "SELECT seq FROM items WHERE holder = ? AND side = ? AND id = ?", (holder, side, item_id)
    ).fetchone()
    if row is None:
        raise InvalidValueError(f"There is no object with id {item_id!r} to page from.", param="after")
    return row[0]


def find_items(connection: sqlite3.Connection, item_ids: Sequence[str], owner: str | None) -> dict[str, bytes]:
    """Return the bodies of the owner's items by id. Missing items are left out.

    Raises InvalidValueError if they are too large, each counted as often as it is named.
    """
    found: dict[str, bytes] = {}
    size = 0
    for item_id in item_ids:
        if item_id not in found:
            row = connection.execute(
                f"SELECT body FROM items WHERE id = :id AND {OWNED} ORDER BY seq DESC LIMIT 1",
                {"id": item_id, "owner": owner},
            ).fetchone()
            if row is None:
                continue
            found[item_id] = row[0]
        size += len(found[item_id])
        check_bytes(size, "input")
    return found


def drop_items(connection: sqlite3.Connection, holder: str) -> None:
    connection.execute("DELETE FROM items WHERE holder = ?", (holder,))


# conversations


def insert_conversation(
    connection: sqlite3.Connection, new: ConversationRecord, items: Sequence[StoredItem]
) -> ConversationRecord:
    """Insert a conversation with its first items. Raises InvalidValueError if they are too large."""
    connection.execute(
        f"INSERT INTO conversations ({_COLUMNS}) VALUES (?, ?, ?, ?, 0)",
        (new.id, new.owner, new.created_at, json.dumps(new.metadata)),
    )
    add_to_conversation(connection, new.id, items, None)
    return new


def get_conversation(connection: sqlite3.Connection, conversation_id: str, owner: str | None) -> ConversationRecord:
    """Return a conversation. Raises NotFoundError."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM conversations WHERE id = :id AND {OWNED}", {"id": conversation_id, "owner": owner}
    ).fetchone()
    if row is None:
        raise NotFoundError(f"Conversation with id '{conversation_id}' not found.", param="conversation")
    try:
        return ConversationRecord(row[0], row[1], row[2], json.loads(row[3]), row[4])
    except ValueError as error:
        raise StoreDamagedError(DAMAGED) from error


def set_metadata(
    connection: sqlite3.Connection, conversation_id: str, metadata: dict[str, str], owner: str | None
) -> ConversationRecord:
    """Replace the metadata. Raises NotFoundError."""
    get_conversation(connection, conversation_id, owner)
    connection.execute("UPDATE conversations SET metadata = ? WHERE id = ?", (json.dumps(metadata), conversation_id))
    return get_conversation(connection, conversation_id, owner)


def delete_conversation(connection: sqlite3.Connection, conversation_id: str, owner: str | None) -> None:
    """Delete a conversation with its items. Raises NotFoundError."""
    get_conversation(connection, conversation_id, owner)
    drop_items(connection, conversation_id)
    connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))


def add_to_conversation(
    connection: sqlite3.Connection, conversation_id: str, items: Sequence[StoredItem], owner: str | None
) -> None:
    """Append items that a client sends. Raises NotFoundError, and InvalidValueError if they are too large."""
    held = get_conversation(connection, conversation_id, owner)
    check_bytes(held.bytes + sum(item.size for item in items), "items")
    for item in items:
        if item_of(connection, conversation_id, item.id) is not None:
            raise InvalidValueError(f"The conversation already has an item with id '{item.id}'.", param="items")
    append_items(connection, held, items)


def append_items(connection: sqlite3.Connection, held: ConversationRecord, items: Sequence[StoredItem]) -> None:
    insert_items(connection, held.id, ITEM, held.owner, items)
    connection.execute(
        "UPDATE conversations SET bytes = bytes + ? WHERE id = ?", (sum(item.size for item in items), held.id)
    )


def conversation_page(connection: sqlite3.Connection, conversation_id: str, query: ListQuery) -> Page[StoredItem]:
    """Return a page of a conversation's items. Raises NotFoundError and InvalidValueError."""
    get_conversation(connection, conversation_id, query.owner)
    return item_page(connection, conversation_id, ITEM, query)


def conversation_history(connection: sqlite3.Connection, conversation_id: str, owner: str | None) -> History:
    """Return the items of a conversation. Raises NotFoundError, and InvalidValueError if answers made it too large."""
    held = get_conversation(connection, conversation_id, owner)
    check_bytes(held.bytes, "conversation")
    return History(tuple(items_of(connection, conversation_id)), 0, held.bytes)


def item_of(connection: sqlite3.Connection, holder: str, item_id: str) -> StoredItem | None:
    row = connection.execute(
        "SELECT id, body FROM items WHERE holder = ? AND id = ? ORDER BY seq DESC LIMIT 1", (holder, item_id)
    ).fetchone()
    return None if row is None else StoredItem(*row)


def get_item(connection: sqlite3.Connection, conversation_id: str, item_id: str, owner: str | None) -> StoredItem:
    """Return an item of a conversation. Raises NotFoundError."""
    get_conversation(connection, conversation_id, owner)
    item = item_of(connection, conversation_id, item_id)
    if item is None:
        raise NotFoundError(f"Item with id '{item_id}' not found in conversation '{conversation_id}'.", param="item_id")
    return item


def delete_item(
    connection: sqlite3.Connection, conversation_id: str, item_id: str, owner: str | None
) -> ConversationRecord:
    """Remove an item of a conversation and return the conversation. Raises NotFoundError."""
    item = get_item(connection, conversation_id, item_id, owner)
    connection.execute("DELETE FROM items WHERE holder = ? AND id = ?", (conversation_id, item_id))
    connection.execute("UPDATE conversations SET bytes = bytes - ? WHERE id = ?", (item.size, conversation_id))
    return get_conversation(connection, conversation_id, owner)


def check_bytes(size: int, param: str) -> None:
    """Raise InvalidValueError if items are larger than a chain or a conversation may be."""
    if size > MAX_HISTORY_BYTES:
        message = f"The conversation would have {size} bytes; this server keeps at most {MAX_HISTORY_BYTES}."
        raise InvalidValueError(message, param=param)
