"""The SQLite file: its version, the lease, and the two threads that touch it.

One thread writes and one reads; each owns its connection. A write is one transaction that begins by checking the
epoch: a process that lost the lease can read, and nothing else. Commits are durable when they return (WAL,
synchronous=FULL). If the disk is full, the log is folded into the database and cut, which may give the room that a
write needs. Once a damaged page was met nothing is written any more. schema.py has the tables; files.py, batches.py,
responses.py, items.py and threads.py know what their rows mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from jaxserve.errors import ConfigError, DiskFullError, HTTPError, ServerError, StorageError, StoreDamagedError
from jaxserve.store.sqlite.condition import ConditionLog
from jaxserve.store.sqlite.disk import Disk, storage_error
from jaxserve.store.sqlite.integrity import DAMAGED, find_damage, missing_columns, store_error
from jaxserve.store.sqlite.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION

logger = logging.getLogger(__name__)

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
    """An open store database. Raises ConfigError where the file is damaged or of a newer version."""

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
        """Keep a copy of the database for the jaxserve that wrote it, and say so: no later one makes it old again."""
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
        """Return a connection of its own for a long read. Raises as `read`."""
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
            return False  # the database itself has to grow for it, and cannot
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
        """Finish what is queued, then close. The last writer folds the log into the database."""
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
    """Convert errors of SQLite and of the system to StorageError or StoreDamagedError; leave bugs as they are."""
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
