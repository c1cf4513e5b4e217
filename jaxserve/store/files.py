"""SQL of the file table. Every function takes the connection first and runs inside a transaction or a read.

A deleted or expired file is hidden at once. Its bytes are kept while an unfinished batch reads them. Its row is kept
for 30 days, so that a client can page on from a file that it has deleted.

owner: the API key that asks, which sees only its own files; None: see all
"""

from __future__ import annotations

import sqlite3

from jaxserve.errors import InvalidValueError, NotFoundError
from jaxserve.store.records import FileRecord, ListQuery, Page

TOMBSTONE_SECONDS = 30 * 24 * 3600

_COLUMNS = "id, purpose, filename, bytes, created_at, expires_at, owner"
VISIBLE = "deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)"
OWNED = "(:owner IS NULL OR owner = :owner)"
PINNED = """id IN (SELECT input_file_id FROM batches
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))"""


def insert_file(connection: sqlite3.Connection, file: FileRecord) -> None:
    connection.execute(
        f"INSERT INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (file.id, file.purpose, file.filename, file.bytes, file.created_at, file.expires_at, file.owner),
    )


def get_file(connection: sqlite3.Connection, file_id: str, now: int, owner: str | None) -> FileRecord:
    """Return a visible file. Raises NotFoundError."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM files WHERE id = :id AND {VISIBLE} AND {OWNED}",
        {"id": file_id, "now": now, "owner": owner},
    ).fetchone()
    if row is None:
        raise no_such_file(file_id)
    return FileRecord(*row)


def list_files(connection: sqlite3.Connection, query: ListQuery, purpose: str | None, now: int) -> Page[FileRecord]:
    """Return a page of the visible files. Raises InvalidValueError if `after` was never the id of a file."""
    where = VISIBLE if purpose is None else f"{VISIBLE} AND purpose = :purpose"
    page = select_page(connection, f"SELECT {_COLUMNS} FROM files WHERE {where}", query, now=now, purpose=purpose)
    return Page([FileRecord(*row) for row in page.items], page.has_more)


def select_page(connection: sqlite3.Connection, select: str, query: ListQuery, **values: object) -> Page[tuple]:
    """Return a page of the rows of `select`, "SELECT ... FROM table WHERE ...", with its named values.

    Raises InvalidValueError if no object of the table ever had the id `after`.
    """
    bound = {"limit": query.limit + 1, "owner": query.owner, **values}
    if query.owner is not None:  # without OWNED, so that SQLite uses the index of owners
        select += " AND owner = :owner"
    if query.after is not None:
        select += f" AND seq {'>' if query.ascending else '<'} :cursor"
        bound["cursor"] = _cursor(connection, select.split(" FROM ")[1].split()[0], query)
    order = "ASC" if query.ascending else "DESC"
    rows = connection.execute(f"{select} ORDER BY seq {order} LIMIT :limit", bound).fetchall()
    return Page(rows[: query.limit], has_more=len(rows) > query.limit)


def _cursor(connection: sqlite3.Connection, table: str, query: ListQuery) -> int:
    row = connection.execute(
        f"SELECT seq FROM {table} WHERE id = :id AND {OWNED}", {"id": query.after, "owner": query.owner}
    ).fetchone()
    if row is None:
        raise InvalidValueError(f"There is no object with id {query.after!r} to page from.", param="after")
    return row[0]


def delete_file(connection: sqlite3.Connection, file_id: str, now: int, owner: str | None) -> None:
    """Hide a file. Raises NotFoundError."""
    cursor = connection.execute(
        f"UPDATE files SET deleted_at = :now WHERE id = :id AND {VISIBLE} AND {OWNED}",
        {"id": file_id, "now": now, "owner": owner},
    )
    if cursor.rowcount == 0:
        raise no_such_file(file_id)


def may_remove(connection: sqlite3.Connection, file_id: str, now: int, owner: str | None) -> bool:
    """Return whether the client sees the file and no batch reads it."""
    row = connection.execute(
        f"SELECT 1 FROM files WHERE id = :id AND {VISIBLE} AND {OWNED} AND NOT {PINNED}",
        {"id": file_id, "now": now, "owner": owner},
    ).fetchone()
    return row is not None


def hide_expired(connection: sqlite3.Connection, now: int) -> None:
    connection.execute(
        "UPDATE files SET deleted_at = :now WHERE deleted_at IS NULL AND expires_at <= :now", {"now": now}
    )


def removable(connection: sqlite3.Connection) -> list[str]:
    """List the ids of files whose bytes are no longer needed."""
    rows = connection.execute(f"SELECT id FROM files WHERE deleted_at IS NOT NULL AND stored AND NOT {PINNED}")
    return [row[0] for row in rows]


def mark_removed(connection: sqlite3.Connection, file_ids: list[str]) -> None:
    connection.executemany("UPDATE files SET stored = 0 WHERE id = ?", [(file_id,) for file_id in file_ids])


def forget_tombstones(connection: sqlite3.Connection, now: int) -> None:
    connection.execute("DELETE FROM files WHERE NOT stored AND deleted_at < ?", (now - TOMBSTONE_SECONDS,))


def stored_ids(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT id FROM files WHERE stored")}


def mark_lost(connection: sqlite3.Connection, file_ids: list[str], now: int) -> None:
    """Hide files whose bytes are missing on the disk, so that every listed file can be read."""
    connection.executemany(
        "UPDATE files SET stored = 0, deleted_at = coalesce(deleted_at, ?) WHERE id = ?",
        [(now, file_id) for file_id in file_ids],
    )


def no_such_file(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {file_id}", param="id")
