"""A store's directory: durable writes in it, which directory may be used, which files are the store's, and its removal.

Everything that must survive a crash goes through one `Disk`: writes, fsyncs, renames, removals and database commits.
Tests pass a subclass that fails, or kills the process, at a chosen operation. Files appear complete or not at all
(`PendingFile`).

The mark, a file with a version, is written before anything else. A directory without it is used only if it is empty or
holds a store from before the mark. Only files with a name that the store itself gives are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxserve.errors import ConfigError, DiskFullError, StorageError


class Disk:
    """The real disk. An operation either has happened when its method returns, or the method raises OSError."""

    def create(self, path: Path) -> BinaryIO:
        """Return a new file for unbuffered writing; it must not exist."""
        return open(path, "xb", buffering=0)

    def write(self, file: BinaryIO, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = file.write(view)
            view = view[written:]

    def fsync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")


class PendingFile:
    """A file written under a temporary name; `publish` makes it durable under its own name.

    Writes are gathered into blocks of `BLOCK` bytes. Every OSError becomes StorageError, after which only `discard` may
    be called: after a failed fsync the content of the disk is unknown, so the file must be written again from the
    start. One thread may discard the file while another writes it.
    """

    BLOCK = 2**20

    def __init__(self, disk: Disk, temporary: Path, target: Path) -> None:
        self._disk = disk
        self._temporary = temporary
        self._target = target
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._published = False
        self.id = target.name
        self.size = 0
        try:
            self._file = disk.create(temporary)
        except OSError as error:
            raise storage_error(error) from error

    def write(self, data: bytes) -> None:
        self._buffer += data
        self.size += len(data)
        if len(self._buffer) >= self.BLOCK:
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        try:
            self._disk.write(self._file, bytes(self._buffer))
        except OSError as error:
            raise storage_error(error) from error
        self._buffer.clear()

    def publish(self) -> None:
        """Write the rest, fsync, rename to the target, fsync the directory. Raises StorageError."""
        with self._lock:
            if self._buffer:
                self._flush()
            try:
                self._disk.fsync(self._file)
                self._file.close()
                self._disk.rename(self._temporary, self._target)
                self._published = True
                self._disk.sync_directory(self._target.parent)
            except OSError as error:
                raise storage_error(error) from error

    def discard(self, *, published: bool) -> None:
        """Remove the temporary file or, if `published`, the published one. The next start removes it if this fails."""
        with self._lock:
            try:
                self._file.close()
                if not self._published:
                    self._disk.unlink(self._temporary)
                elif published:
                    self._disk.unlink(self._target)
            except OSError:
                return


def is_full(error: Exception) -> bool:
    """Return whether an error means that the disk has no room."""
    return isinstance(error, DiskFullError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def storage_error(error: OSError) -> StorageError:
    """Return the error for a disk that cannot be used: 507, with the cause and without a path."""
    if is_full(error):
        return DiskFullError("The server's disk is full.")
    return StorageError(f"The server's store cannot be written: {os.strerror(error.errno or errno.EIO)}.")


MARK = "jaxserve-store"
MARK_VERSION = 1
DATABASE = "store.db"
FILES = "files"
TMP = "tmp"
ENCRYPTION_KEY = "sealing-key"  # of api/encryption.py

TABLES = frozenset({"lease", "files", "batches", "results", "idempotency"})  # since version 1 of the database

_OWN_FILES = {MARK, "lock", ENCRYPTION_KEY, DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"}
# copies of databases of earlier versions, see database.py
_COPY = re.compile(rf"{re.escape(DATABASE)}\.version-\d+(\.unfinished(-journal|-wal|-shm)?)?", re.ASCII)
_OWN_NAMES = {FILES: re.compile(r"file-[0-9a-f]{24}"), TMP: re.compile(r"[0-9a-f]{24}|mark")}
_OF_FILE_SYSTEMS = {"lost+found"}  # in the root of a volume


def check_usable(directory: Path) -> None:
    """Check that a directory is new or a store. Raises ConfigError if it is neither, and OSError."""
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
    """Remove a closed store. Files that the store did not make stay, with the directories above them."""
    paths = [path for kind in (FILES, TMP) for path in own_files(directory, kind)]
    paths += [path for path in directory.iterdir() if _COPY.fullmatch(path.name)]
    for path in [*paths, *(directory / name for name in _OWN_FILES - {MARK}), directory / MARK]:
        path.unlink(missing_ok=True)
    for path in (directory / FILES, directory / TMP, directory):
        with contextlib.suppress(OSError):
            path.rmdir()


def _is_new(directory: Path) -> bool:
    """Return whether a directory has only files that a start which was cut short may have left."""
    for path in directory.iterdir():
        if path.name in _OWN_NAMES:
            if set(path.iterdir()) - set(own_files(directory, path.name)):
                return False
        elif path.name not in _OWN_FILES | _OF_FILE_SYSTEMS:
            return False
    return True


def _is_old_store(database: Path) -> bool:
    """Return whether a database belongs to a store. It may be another program's, so it is only read."""
    if not database.is_file():
        return False
    try:
        uri = f"{database.resolve().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    except sqlite3.Error:
        return False
    return {row[0] for row in names} >= TABLES
