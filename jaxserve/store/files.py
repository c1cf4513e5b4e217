"""SQL of the file table. Every function takes the connection first and runs inside a transaction or a read.

A deleted or expired file is hidden at once. Its bytes are kept while an unfinished batch reads them. Its row is kept
for
a while, so that a client can page on from a file that it has just deleted.

owner: the API key that asks. It sees only its own files; None sees those of all keys.
"""

from __future__ import annotations

import sqlite3

from jaxserve.errors import InvalidValueError, NotFoundError
from jaxserve.store.records import FileRecord, Page

TOMBSTONE_SECONDS = 30 * 24 * 3600

COLUMNS = "id, purpose, filename, bytes, created_at, expires_at, owner"
VISIBLE = "deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)"
OWNED = "(:owner IS NULL OR owner = :owner)"
PINNED = """id IN (SELECT input_file_id FROM batches
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))"""


def insert_file(connection: sqlite3.Connection, file: FileRecord) -> None:
    connection.execute(
        f"INSERT INTO files ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (file.id, file.purpose, file.filename, file.bytes, file.created_at, file.expires_at, file.owner),
    )


def get_file(connection: sqlite3.Connection, file_id: str, now: int, owner: str | None) -> FileRecord:
    """Return a visible file. Raises NotFoundError."""
    row = connection.execute(
        f"SELECT {COLUMNS} FROM files WHERE id = :id AND {VISIBLE} AND {OWNED}",
        {"id": file_id, "now": now, "owner": owner},
    ).fetchone()
    if row is None:
        raise no_such_file(file_id)
    return FileRecord(*row)


def list_files(
    connection: sqlite3.Connection,
    *,
    purpose: str | None,
    limit: int,
    after: str | None,
    ascending: bool,
    now: int,
    owner: str | None,
) -> Page[FileRecord]:
    """Return a page of the visible files. Raises InvalidValueError if `after` was never the id of a file."""
    where, order = [VISIBLE], "ASC" if ascending else "DESC"
    if owner is not None:
        where.append("owner = :owner")
    if purpose is not None:
        where.append("purpose = :purpose")
    if after is not None:
        where.append(f"seq {'>' if ascending else '<'} :cursor")
    values = {"now": now, "purpose": purpose, "limit": limit + 1, "owner": owner, "cursor": None}
    if after is not None:
        values["cursor"] = cursor(connection, "files", after, owner)
    rows = connection.execute(
        f"SELECT {COLUMNS} FROM files WHERE {' AND '.join(where)} ORDER BY seq {order} LIMIT :limit", values
    ).fetchall()
    return Page([FileRecord(*row) for row in rows[:limit]], has_more=len(rows) > limit)


def cursor(connection: sqlite3.Connection, table: str, after: str, owner: str | None) -> int:
    """Return the position of an object in its list. Raises InvalidValueError if no object ever had the id."""
    row = connection.execute(
        f"SELECT seq FROM {table} WHERE id = :id AND {OWNED}", {"id": after, "owner": owner}
    ).fetchone()
    if row is None:
        raise InvalidValueError(f"There is no object with id {after!r} to page from.", param="after")
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
