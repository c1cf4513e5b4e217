"""Checks a store's directory, copies it while a server uses it, and puts a copy back: the operator's commands.

A backup is a directory with the files of a store: the database, the contents of files and the key of sealed answers.
The database is copied first, as it is at one moment, and then the contents that it knows. These never change, so the
copy is whole although the server writes on; a file that was deleted meanwhile is missing in it, and the start hides it.
The mark is written last: a directory without it is not a backup.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.store import files
from jaxserve.store.database import SCHEMA, SCHEMA_VERSION, find_damage, lock_holder, missing_columns
from jaxserve.store.directory import (
    DATABASE,
    ENCRYPTION_KEY,
    FILES,
    MARK,
    TMP,
    Disk,
    check_usable,
    mark,
    own_files,
    storage_error,
)

TABLES = ("files", "batches", "responses", "conversations", "threads")  # that `check` counts


@dataclass(frozen=True)
class StoreReport:
    """The state of a store.

    version: of the database. rows: number of rows by table. damage: a sentence; None if the database is whole
    missing: ids of files whose contents are not there. unknown: contents that no file names, which a start removes
    size: bytes of the database and of the contents. holder: pid of the process that uses it; "" if none does
    """

    version: int
    rows: dict[str, int]
    damage: str | None
    missing: list[str]
    unknown: list[str]
    size: int
    holder: str


def check(directory: Path) -> StoreReport:
    """Read all of a store without changing it. Raises ConfigError if it is none, or of a newer version."""
    _check_is_store(directory)
    with _opened(directory) as connection:
        version = _version(connection, directory)
        damage = find_damage(connection)
        if damage is None and version == SCHEMA_VERSION and (columns := missing_columns(connection, SCHEMA)):
            damage = f"it lacks {', '.join(columns[:3])}"
        present = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        rows = {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in TABLES
            if table in present
        }
        known = files.stored_ids(connection)
    sizes: dict[str, int] = {}
    for path in own_files(directory, FILES):
        with contextlib.suppress(FileNotFoundError):  # a server deletes files meanwhile
            sizes[path.name] = path.stat().st_size
    size = (directory / DATABASE).stat().st_size + sum(sizes.values())
    missing, unknown = sorted(known - sizes.keys()), sorted(sizes.keys() - known)
    return StoreReport(version, rows, damage, missing, unknown, size, lock_holder(directory))


def backup(directory: Path, target: Path, disk: Disk | None = None) -> StoreReport:
    """Copy a store, which a server may use, to a directory that is empty or does not exist. Returns the copy's state.

    Raises ConfigError, and StorageError if the disk refuses.
    """
    _check_is_store(directory)
    _copy(directory, target, disk or Disk())
    return check(target)


def restore(source: Path, directory: Path, disk: Disk | None = None) -> StoreReport:
    """Copy a backup to a store's directory, which is empty or does not exist. Returns the store's state.

    Raises ConfigError, also for a backup that is damaged or lacks contents, and StorageError if the disk refuses.
    """
    report = check(source)
    if report.damage is not None:
        raise ConfigError(f"the backup {source} is damaged: {report.damage}", fix="use another backup")
    _copy(source, directory, disk or Disk())
    return check(directory)


def _copy(source: Path, target: Path, disk: Disk) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not an empty directory", fix="name a directory that is empty or does not exist")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{target} is inside of {source}", fix="name a directory elsewhere")
    try:
        for path in (target, target / FILES, target / TMP):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(source) as connection, contextlib.closing(sqlite3.connect(target / DATABASE)) as copy:
            _version(connection, source)
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # no log is left beside it
            known = sorted(files.stored_ids(copy))
        names = [ENCRYPTION_KEY, *(f"{FILES}/{file_id}" for file_id in known)]
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # no key yet; a file that was deleted meanwhile
                shutil.copy2(source / name, target / name)
        for name in (DATABASE, *names):
            if (target / name).exists():
                with open(target / name, "rb") as file:
                    disk.fsync(file)
        disk.sync_directory(target / FILES)
        mark(target, disk)
    except sqlite3.Error as error:
        raise ConfigError(f"the store database of {source} cannot be copied: {error}", fix="check its disk") from error
    except OSError as error:
        raise storage_error(error) from error


def _check_is_store(directory: Path) -> None:
    if not (directory / MARK).is_file() or not (directory / DATABASE).is_file():
        raise ConfigError(f"{directory} is no store of jaxserve", fix="name the directory of store.path, or a backup")
    check_usable(directory)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[sqlite3.Connection]:
    """Open the database to read. A server may write meanwhile."""
    uri = f"{(directory / DATABASE).resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            yield connection
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"the store database of {directory} cannot be read: {error}", fix="restore a backup"
        ) from error


def _version(connection: sqlite3.Connection, directory: Path) -> int:
    """Return the version of a database. Raises ConfigError if this jaxserve does not know it."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if not 0 < version <= SCHEMA_VERSION:
        raise ConfigError(
            f"the store {directory} has version {version}; this jaxserve knows 1 to {SCHEMA_VERSION}",
            fix="use the newer jaxserve",
        )
    return version
