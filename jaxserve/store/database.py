"""The SQLite file of a store: its tables, its version, its lease, its condition, and the two threads that touch it.

One thread writes and one reads; each owns its connection. A write is one transaction that begins by checking the
epoch: a process that lost the lease can only read. Commits are durable when they return (WAL, synchronous=FULL). If the
disk is full, the log is folded into the database and cut, which may free the room that a write needs. Once a damaged
page was met nothing is written any more.

    StoreCondition    whether the store can be written, for /health, the metrics and the log
    find_damage       checks a database before anything is read from it; store_error tells damage from a bad disk
    DirectoryLock     lets one server use a directory; the kernel drops the lock when its process dies, however it dies
    SCHEMA            the tables, and the steps that upgrade a database of an earlier version
    Database          the open file

files.py, batches.py, responses.py, items.py and threads.py know the meaning of the rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

from jaxserve.errors import ConfigError, DiskFullError, HTTPError, ServerError, StorageError, StoreDamagedError
from jaxserve.store.directory import Disk, storage_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreCondition:
    """Whether the store can be written.

    full: the disk has no room; failing: it refuses for another reason; damaged: read-only until repaired.
    """

    status: Literal["ok", "full", "failing", "damaged"] = "ok"
    detail: str | None = None


class ConditionLog:
    """The condition after the latest write. Each change is logged once. Thread-safe."""

    def __init__(self) -> None:
        self.now = StoreCondition()
        self._lock = threading.Lock()

    def failed(self, error: HTTPError) -> None:
        """Record that a write or a read failed with `error`."""
        match error:
            case StoreDamagedError():
                status, level = "damaged", logging.CRITICAL
            case DiskFullError():
                status, level = "full", logging.ERROR
            case _:
                status, level = "failing", logging.ERROR
        with self._lock:
            if self.now.status in (status, "damaged"):
                return
            self.now = StoreCondition(status, error.message)
        logger.log(level, "the store is %s: %s", status, error.message)

    def succeeded(self) -> None:
        """Record that a write is durable."""
        if self.now.status in ("ok", "damaged"):
            return
        with self._lock:
            self.now = StoreCondition()
        logger.info("the store can be written again")


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
    """Return the damage of a database; None if there is none. Reads all of it.

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
    """Return the error for clients that an error of SQLite means; None for a bug of this package."""
    code = getattr(error, "sqlite_errorcode", -1)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:  # the second: no room for its index
        return DiskFullError("The server's disk is full.")
    if primary in DISK_CODES:
        return StorageError(f"The server's store cannot be written: {error}.")
    # An OperationalError that the disk did not cause: a table is gone, or a text is not UTF-8.
    if isinstance(error, sqlite3.OperationalError) or primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreDamagedError(DAMAGED)
    return None


class DirectoryLock:
    """Holds `<directory>/lock` until `release`. Raises ConfigError if another process holds it."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise ConfigError(
                f"the store {directory} is in use by another process (pid {holder})",
                fix="stop that server, or give this one its own directory with --store.path",
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


def lock_holder(directory: Path) -> str:
    """Return the pid of the process that holds a store's directory, or "unknown"; "" if none does. Writes nothing."""
    try:
        with open(directory / "lock", encoding="ascii", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return (directory / "lock").read_text(encoding="ascii", errors="replace").strip() or "unknown"
    except OSError:  # there is no store yet
        pass
    return ""


SCHEMA_VERSION = 5

_FILES_AND_BATCHES = """
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
    stored INTEGER NOT NULL DEFAULT 1,  -- 0: the bytes are gone
    owner TEXT NOT NULL DEFAULT ''  -- the name of an API key; '': the default key
);
CREATE INDEX files_owner ON files (owner);
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
    owner TEXT NOT NULL DEFAULT '',
    CHECK (completed + failed <= total)
);
CREATE INDEX batches_owner ON batches (owner);
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
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    response BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (owner, key)
);
"""

# Responses and conversations. A response keeps only its own input; `previous_id` leads to the response before it.
_RESPONSES = """
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    ended_at INTEGER,
    background INTEGER NOT NULL,
    logged INTEGER NOT NULL,        -- its events are in response_events
    seen INTEGER NOT NULL DEFAULT 0,  -- a client may have read its events
    previous_id TEXT,
    conversation_id TEXT,
    turns INTEGER NOT NULL,         -- responses in the chain that ends here
    bytes INTEGER NOT NULL,         -- of the items of that chain
    request BLOB,                   -- the body of a background response, until it has ended
    body BLOB NOT NULL              -- the Response object without its output
);
CREATE INDEX responses_previous ON responses (previous_id) WHERE previous_id IS NOT NULL;
CREATE INDEX responses_expiry ON responses (expires_at);
CREATE INDEX responses_live ON responses (status) WHERE status IN ('queued', 'in_progress');
CREATE INDEX responses_logged ON responses (ended_at) WHERE logged;
CREATE TABLE items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order of the conversation
    holder TEXT NOT NULL,           -- id of the response or conversation
    side TEXT NOT NULL,             -- input or output of a response; item of a conversation
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX items_holder ON items (holder, side);
CREATE INDEX items_id ON items (id);
CREATE TABLE response_events (
    response_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (response_id, number)
);
CREATE TABLE conversations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    metadata TEXT NOT NULL,
    bytes INTEGER NOT NULL          -- of its items
);
"""

# Threads of Messages. Only the latest reply of a thread can be continued; the ids of the earlier ones tell why not.
_THREADS = """
CREATE TABLE threads (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    last_id TEXT NOT NULL UNIQUE,   -- id of its latest reply
    owner TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    bytes INTEGER NOT NULL,         -- of the head and the turns
    head BLOB NOT NULL              -- JSON of what later requests leave out: system and tools
);
CREATE INDEX threads_owner ON threads (owner, expires_at, bytes);
CREATE INDEX threads_expiry ON threads (expires_at);
CREATE TABLE thread_turns (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order of the conversation
    id TEXT NOT NULL UNIQUE,        -- of its reply
    thread INTEGER NOT NULL REFERENCES threads (seq) ON DELETE CASCADE,
    body BLOB NOT NULL              -- JSON list of its messages, the reply last
);
CREATE INDEX thread_turns_thread ON thread_turns (thread);
"""

_ADAPTERS = """
CREATE TABLE adapters (
    name TEXT PRIMARY KEY,
    body BLOB NOT NULL              -- JSON of what is needed to load it again
);
"""

SCHEMA = _FILES_AND_BATCHES + _RESPONSES + _THREADS + _ADAPTERS

# The statements that upgrade a database of each version to the next.
MIGRATIONS = {
    1: """
ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT '';
CREATE INDEX files_owner ON files (owner);
ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT '';
CREATE INDEX batches_owner ON batches (owner);
ALTER TABLE idempotency RENAME TO idempotency_1;
CREATE TABLE idempotency (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    response BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (owner, key)
);
INSERT INTO idempotency SELECT '', key, fingerprint, response, created_at FROM idempotency_1;
DROP TABLE idempotency_1;
""",
    2: _RESPONSES,
    3: _THREADS,
    4: _ADAPTERS,
}


REPAIR = "restore the directory from a backup, or move it away to start with an empty store"

# The log is folded into the database once it has so many pages (1 MiB), and is cut to that size afterwards. SQLite's
# own 1,000 pages are more than a small disk has.
LOG_PAGES = 256
PAGE_BYTES = 4096

P = ParamSpec("P")
T = TypeVar("T")
Statement = Callable[Concatenate[sqlite3.Connection, P], T]


class LeaseLostError(ServerError):
    """Another process has taken the store over; this one may not write any more."""

    status = 503
    code = "store_lease_lost"


class Database:
    """An open store database. Raises ConfigError if the file is damaged or of a newer version."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self.condition = ConditionLog()
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._writer = _connect(path)
        try:
            with _known_errors():
                _configure(self._writer)
                self._check(find_damage(self._writer))
                self.epoch = self._take_lease()
                self._empty_log()
                self._reader = self.connect_reader()
        except (StorageError, StoreDamagedError) as error:
            self._writer.close()
            cause = error.__cause__
            raise ConfigError(f"the store database {path} cannot be opened: {cause}", fix=_fix(error)) from cause
        except BaseException:
            self._writer.close()
            raise

    def _check(self, damage: str | None) -> None:
        if damage is not None:
            raise ConfigError(f"the store database {self._path} is damaged: {damage}", fix=REPAIR)

    def _take_lease(self) -> int:
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"the store database {self._path} has version {version}; this jaxserve knows {SCHEMA_VERSION}",
                fix="use the newer jaxserve, or another --store.path; docs/upgrading.md tells the way back",
            )
        if 0 < version < SCHEMA_VERSION:
            self._keep_copy(version)
        self._writer.execute("BEGIN IMMEDIATE")
        scripts = [SCHEMA] if version == 0 else [MIGRATIONS[old] for old in range(version, SCHEMA_VERSION)]
        for statement in (statement for script in scripts for statement in script.split(";\n")):
            self._writer.execute(statement)
        self._writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._writer.execute("UPDATE lease SET epoch = epoch + 1, owner = ?", (f"{os.uname().nodename}:{os.getpid()}",))
        epoch = self._writer.execute("SELECT epoch FROM lease").fetchone()[0]
        missing = missing_columns(self._writer, SCHEMA)
        self._check(f"it lacks {', '.join(missing[:3])}" if missing else None)
        self._disk.commit(self._writer)
        return epoch

    def _keep_copy(self, version: int) -> None:
        """Keep a copy of the database for the jaxserve that wrote it, and log that, because no upgrade is undone."""
        copy = self._path.with_name(copy_name(self._path.name, version))
        unfinished = copy.with_name(f"{copy.name}.unfinished")
        self._disk.unlink(unfinished)
        try:
            with contextlib.closing(sqlite3.connect(unfinished)) as target:
                self._writer.backup(target)
                target.execute("PRAGMA journal_mode = DELETE")  # a reader of the copy leaves no log beside it
            with open(unfinished, "rb") as file:
                self._disk.fsync(file)
            self._disk.rename(unfinished, copy)
            self._disk.sync_directory(copy.parent)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        logger.warning(
            "the store database %s is upgraded from version %d to %d; a copy for the jaxserve of before is %s",
            self._path,
            version,
            SCHEMA_VERSION,
            copy,
        )

    def connect_reader(self) -> sqlite3.Connection:
        connection = _connect(self._path)
        connection.execute("PRAGMA query_only = ON")
        return connection

    @contextlib.contextmanager
    def scan(self) -> Iterator[sqlite3.Connection]:
        """Open a separate connection for a long read. Raises as `read` does."""
        with self._noted(), contextlib.closing(self.connect_reader()) as connection:
            yield connection

    async def write(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `statement(connection, ...)` as one transaction; durable when this returns.

        Raises StorageError if the disk refuses (nothing has changed then), StoreDamagedError and LeaseLostError.
        """
        call = lambda: self.write_now(statement, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._writing, call)

    async def read(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `statement(connection, ...)`. Raises StorageError and StoreDamagedError."""

        def call() -> T:
            with self._noted():
                return statement(self._reader, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._reading, call)

    def write_blocking(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `write` from a thread that may wait; the writer thread still runs it."""
        return self._writing.submit(lambda: self.write_now(statement, *args, **kwargs)).result()

    def write_now(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the transaction on the writer thread (or before the threads have work).

        Raises StoreDamagedError if the store is damaged, LeaseLostError if another process owns it, else as `write`.
        """
        if self.condition.now.status == "damaged":
            raise StoreDamagedError(DAMAGED)
        with self._noted():
            try:
                result = self._transaction(statement, *args, **kwargs)
            except DiskFullError:
                if not self._empty_log():
                    raise
                result = self._transaction(statement, *args, **kwargs)
        self.condition.succeeded()
        return result

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Convert errors to those that clients see, and record them in the condition."""
        try:
            with _known_errors():
                yield
        except (StorageError, StoreDamagedError) as error:
            self.condition.failed(error)
            raise

    def _empty_log(self) -> bool:
        """Fold the log into the database and truncate it; return whether that made room."""
        log = self._path.with_name(f"{self._path.name}-wal")
        before = log.stat().st_size
        try:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error:
            return False  # the database itself would have to grow, and cannot
        return log.stat().st_size < before

    def _transaction(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        connection = self._writer
        with _known_errors():
            connection.execute("BEGIN IMMEDIATE")
            try:
                if connection.execute("SELECT epoch FROM lease").fetchone() != (self.epoch,):
                    raise LeaseLostError("Another process has taken this server's store over.")
                result = statement(connection, *args, **kwargs)
                self._disk.commit(connection)
                return result
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def close(self) -> None:
        """Finish the queued work, then close. The last writer folds the log into the database."""
        for executor, connection in ((self._reading, self._reader), (self._writing, self._writer)):
            executor.submit(connection.close).result()
            executor.shutdown()


def copy_name(database: str, version: int) -> str:
    """Return the name of the copy that is kept of a database of an earlier version."""
    return f"{database}.version-{version}"


def _connect(path: Path) -> sqlite3.Connection:
    # Each connection is used by one thread at a time, which need not be the one that opened it.
    return sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)


def _configure(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_PAGES * PAGE_BYTES}")


@contextlib.contextmanager
def _known_errors() -> Iterator[None]:
    """Convert errors of SQLite and of the system to StorageError or StoreDamagedError. Bugs pass unchanged."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        known = storage_error(error) if isinstance(error, OSError) else store_error(error)
        if known is None:
            raise
        raise known from error


def _fix(error: HTTPError) -> str:
    match error:
        case DiskFullError():
            return "make room on its disk"
        case StoreDamagedError():
            return REPAIR
        case _:
            return "check the disk and who may write the directory"
