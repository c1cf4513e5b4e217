"""Write bytes durably, and make files appear complete or not at all.

Everything that must survive a crash goes through one `Disk`: writes, fsyncs, renames, removals and database commits.
Tests pass a subclass that fails, or kills the process, at a chosen operation.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from pathlib import Path
from typing import BinaryIO

from jaxserve.errors import DiskFullError, StorageError


class Disk:
    """The real disk. Every method either has happened when it returns or raises OSError."""

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
    be
    called: after a failed fsync the content of the disk is unknown, so the file must be written again from the start.
    One thread may discard the file while another writes it.
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
        """Remove the temporary file or, on request, the published one. What cannot be removed is removed at next
        start.
        """
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
