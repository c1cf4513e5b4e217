"""Check a store's database before anything is read from it, and tell damage from a disk that cannot be used."""

from __future__ import annotations

import contextlib
import sqlite3

from jaxserve.errors import DiskFullError, HTTPError, StorageError, StoreDamagedError

# Primary SQLite result codes (the low byte of the extended ones) of a disk that cannot be read or written.
DISK_CODES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
    }
)

DAMAGED = "The server's store is damaged and cannot be changed until it is repaired."


def find_damage(connection: sqlite3.Connection) -> str | None:
    """Return what is wrong with a database; None if nothing is. Reads all of it.

    Raises sqlite3.Error if it cannot be read at all.
    """
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return None if found == "ok" else found.replace("\n", " ")


def missing_columns(connection: sqlite3.Connection, schema: str) -> list[str]:
    """Return the columns, as table.column, that `schema` has and the database lacks."""
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(schema)
        expected = _columns(fresh)
    return sorted(expected - _columns(connection))


def _columns(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute(
        """SELECT tables.name || '.' || columns.name FROM sqlite_master AS tables,
           pragma_table_info(tables.name) AS columns WHERE tables.type = 'table'"""
    )
    return {row[0] for row in rows}


def store_error(error: sqlite3.Error) -> HTTPError | None:
    """Return the error for clients that an error of SQLite means; None for a bug of ours."""
    code = getattr(error, "sqlite_errorcode", -1)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:  # the second: no room for its index
        return DiskFullError("The server's disk is full.")
    if primary in DISK_CODES:
        return StorageError(f"The server's store cannot be written: {error}.")
    # An OperationalError that is not the disk's: a table is gone, or a text is not UTF-8.
    if isinstance(error, sqlite3.OperationalError) or primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreDamagedError(DAMAGED)
    return None
