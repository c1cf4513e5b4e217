"""The SQLite file: schema and version, the lease, and the two threads that touch it.

One thread writes and one reads; each owns its connection. A write is one transaction that begins by checking the
epoch: a process that lost the lease can read, and nothing else. Commits are durable when they return (WAL,
synchronous=FULL). What the rows mean is files.py's and batches.py's business.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from jaxserve.errors import ConfigError, ServerError, StorageError
from jaxserve.store.disk import Disk, storage_error

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE lease (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    epoch INTEGER NOT NULL,
    owner TEXT NOT NULL
);
INSERT INTO lease VALUES (1, 0, '');
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    deleted_at INTEGER,             -- hidden from clients; the row stays for a while as a cursor of lists
    stored INTEGER NOT NULL DEFAULT 1  -- 0: the bytes are gone
);
CREATE INDEX files_expiry ON files (expires_at) WHERE deleted_at IS NULL AND expires_at IS NOT NULL;
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    model TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    errors TEXT NOT NULL DEFAULT '[]',
    metadata TEXT,
    output_expires_seconds INTEGER,
    CHECK (completed + failed <= total)
);
CREATE INDEX batches_live ON batches (status) WHERE status IN
    ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE TABLE results (
    batch INTEGER NOT NULL REFERENCES batches (seq),
    line INTEGER NOT NULL,
    succeeded INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (batch, line)
);
CREATE TABLE idempotency (
    key TEXT PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    response BLOB NOT NULL,
    created_at INTEGER NOT NULL
);
"""

# Primary SQLite result codes (the low byte of the extended ones) that mean: the disk, not a bug.
DISK_ERRORS = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
    }
)

P = ParamSpec("P")
T = TypeVar("T")
Statement = Callable[Concatenate[sqlite3.Connection, P], T]


class LeaseLostError(ServerError):
    """Another process has taken the store over; this one may not write any more."""

    status = 503
    code = "store_lease_lost"


class Database:
    """An open store database. Raises ConfigError where the file is damaged or of a newer version."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        try:
            self._writer = _open(path)
            self.epoch = self._take_lease()
            self._reader = self.connect_reader()
        except sqlite3.Error as error:
            raise ConfigError(
                f"the store database {path} cannot be opened: {error}",
                fix="check the disk; move the directory away to start with an empty store",
            ) from error

    def _take_lease(self) -> int:
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"the store database {self._path} has version {version}; this jaxserve knows {SCHEMA_VERSION}",
                fix="use the newer jaxserve, or another --store.path",
            )
        self._writer.execute("BEGIN IMMEDIATE")
        if version == 0:
            for statement in SCHEMA.split(";\n"):
                self._writer.execute(statement)
            self._writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._writer.execute("UPDATE lease SET epoch = epoch + 1, owner = ?", (f"{os.uname().nodename}:{os.getpid()}",))
        epoch = self._writer.execute("SELECT epoch FROM lease").fetchone()[0]
        self._disk.commit(self._writer)
        return epoch

    def connect_reader(self) -> sqlite3.Connection:
        """A connection of its own for a long scan; the caller closes it."""
        connection = _connect(self._path)
        connection.execute("PRAGMA query_only = ON")
        return connection

    async def write(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `statement(connection, ...)` as one transaction; durable when this returns.

        Raises StorageError where the disk refuses (nothing has changed then) and LeaseLostError.
        """
        call = lambda: self.write_now(statement, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._writing, call)

    async def read(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = lambda: _run(self._reader, statement, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._reading, call)

    def write_blocking(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`write` for a thread that may wait; still executed by the one writer thread."""
        return self._writing.submit(lambda: self.write_now(statement, *args, **kwargs)).result()

    def write_now(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The transaction itself, on the writer thread (or before the threads have work)."""
        return _run(self._writer, self._transaction, statement, *args, **kwargs)

    def _transaction(
        self, connection: sqlite3.Connection, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        connection.execute("BEGIN IMMEDIATE")
        try:
            if connection.execute("SELECT epoch FROM lease").fetchone()[0] != self.epoch:
                raise LeaseLostError("Another process has taken this server's store over.")
            result = statement(connection, *args, **kwargs)
            self._disk.commit(connection)
            return result
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def close(self) -> None:
        """Finish what is queued, then close. The last writer folds the log into the database."""
        for executor, connection in ((self._reading, self._reader), (self._writing, self._writer)):
            executor.submit(connection.close).result()
            executor.shutdown()


def _connect(path: Path) -> sqlite3.Connection:
    # Each connection is used by one thread at a time, which need not be the one that opened it.
    return sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)


def _open(path: Path) -> sqlite3.Connection:
    connection = _connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _run(connection: sqlite3.Connection, statement: Callable[..., T], *args: object, **kwargs: object) -> T:
    try:
        return statement(connection, *args, **kwargs)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in DISK_ERRORS:
            raise
        full = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
        cause = "The server's disk is full." if full else f"The server's store cannot be written: {error}."
        raise StorageError(cause) from error
    except OSError as error:
        raise storage_error(error) from error
