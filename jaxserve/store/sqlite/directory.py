"""A store's directory: which one may be used, what in it is the store's, and its removal.

The mark, a file with a version, is written before anything else. A directory without it is used only if it is empty or
holds a store of before the mark. Only files with a name that the store itself gives are ever removed.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.store.sqlite.disk import Disk

MARK = "jaxserve-store"
MARK_VERSION = 1
DATABASE = "store.db"
FILES = "files"
TMP = "tmp"
SEALING_KEY = "sealing-key"  # of api/shared/sealing.py

TABLES = frozenset({"lease", "files", "batches", "results", "idempotency"})  # since version 1 of the database

_OWN_FILES = {MARK, "lock", SEALING_KEY, DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"}
# copies of databases of earlier versions, see database.py
_COPY = re.compile(rf"{re.escape(DATABASE)}\.version-\d+(\.unfinished(-journal|-wal|-shm)?)?", re.ASCII)
_OWN_NAMES = {FILES: re.compile(r"file-[0-9a-f]{24}"), TMP: re.compile(r"[0-9a-f]{24}|mark")}
_OF_FILE_SYSTEMS = {"lost+found"}  # in the root of a volume


def check_usable(directory: Path) -> None:
    """Raises ConfigError for a directory that is neither new nor a store, and OSError."""
    if not directory.exists() or (directory / MARK).is_file():
        return
    if _is_new(directory) or _is_old_store(directory / DATABASE):
        return
    raise ConfigError(
        f"{directory} is not empty and is no store of jaxserve",
        fix="name an empty directory, or one that does not exist yet, with --store.path",
    )


def mark(directory: Path, disk: Disk) -> None:
    """Write the mark, or check its version. Raises ConfigError for a newer one, and OSError."""
    path = directory / MARK
    if path.is_file():
        version = path.read_text(encoding="utf-8", errors="replace").strip()
        if version != str(MARK_VERSION):
            raise ConfigError(
                f"the store {directory} has version {version[:20]!r}; this jaxserve knows {MARK_VERSION}",
                fix="use the newer jaxserve, or another --store.path",
            )
        return
    temporary = directory / TMP / "mark"
    disk.unlink(temporary)
    with disk.create(temporary) as file:
        disk.write(file, f"{MARK_VERSION}\n".encode())
        disk.fsync(file)
    disk.rename(temporary, path)
    disk.sync_directory(directory)


def own_files(directory: Path, kind: str) -> Iterator[Path]:
    """Return the files in `directory`/`kind` (FILES or TMP) that the store has made."""
    for path in (directory / kind).iterdir():
        if _OWN_NAMES[kind].fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
            yield path


def remove(directory: Path) -> None:
    """Remove a store that is closed. What is not the store's stays, with the directories above it."""
    paths = [path for kind in (FILES, TMP) for path in own_files(directory, kind)]
    paths += [path for path in directory.iterdir() if _COPY.fullmatch(path.name)]
    for path in [*paths, *(directory / name for name in _OWN_FILES - {MARK}), directory / MARK]:
        path.unlink(missing_ok=True)
    for path in (directory / FILES, directory / TMP, directory):
        with contextlib.suppress(OSError):
            path.rmdir()


def _is_new(directory: Path) -> bool:
    """Return whether nothing is there but what a start that was cut short may have left."""
    for path in directory.iterdir():
        if path.name in _OWN_NAMES:
            if set(path.iterdir()) - set(own_files(directory, path.name)):
                return False
        elif path.name not in _OWN_FILES | _OF_FILE_SYSTEMS:
            return False
    return True


def _is_old_store(database: Path) -> bool:
    """Return whether a database is one of ours. It may belong to another program, so it is only read."""
    if not database.is_file():
        return False
    try:
        uri = f"{database.resolve().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    except sqlite3.Error:
        return False
    return {row[0] for row in names} >= TABLES
