"""Disks that misbehave on purpose: the test-only seam under the store."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
from pathlib import Path
from typing import BinaryIO

from jaxserve.store import Disk

OPERATIONS = ("create", "write", "fsync", "rename", "sync_directory", "unlink", "commit")


class WatchedDisk(Disk):
    """Calls `before(name)` and `after(name)` around every operation."""

    def before(self, name: str) -> None: ...

    def after(self, name: str) -> None: ...

    def create(self, path: Path) -> BinaryIO:
        self.before("create")
        file = super().create(path)
        self.after("create")
        return file

    def write(self, file: BinaryIO, data: bytes) -> None:
        self.before("write")
        super().write(file, data)
        self.after("write")

    def fsync(self, file: BinaryIO) -> None:
        self.before("fsync")
        super().fsync(file)
        self.after("fsync")

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename")
        super().rename(source, target)
        self.after("rename")

    def sync_directory(self, path: Path) -> None:
        self.before("sync_directory")
        super().sync_directory(path)
        self.after("sync_directory")

    def unlink(self, path: Path) -> None:
        self.before("unlink")
        super().unlink(path)
        self.after("unlink")

    def commit(self, connection: sqlite3.Connection) -> None:
        self.before("commit")
        super().commit(connection)
        self.after("commit")


class FailingDisk(WatchedDisk):
    """Operations named in `failing` raise OSError(`code`) until they are taken out again."""

    def __init__(self, code: int = errno.ENOSPC) -> None:
        self.code = code
        self.failing: set[str] = set()
        self.refused = 0

    def before(self, name: str) -> None:
        if name in self.failing:
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code))


class KillingDisk(WatchedDisk):
    """Kills its own process with SIGKILL at the `kill_at`-th border between two operations, counted from 0.

    The borders are before the first operation, and before and after each: an operation that has run and one that has
    not are different crashes. With `torn`, a write that is to be killed stops half way.
    """

    def __init__(self, kill_at: int, counting: frozenset[str] = frozenset(OPERATIONS)) -> None:
        self.kill_at = kill_at
        self.counting = counting
        self.borders = 0

    def _pass(self, name: str) -> None:
        if name not in self.counting:
            return
        if self.borders == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.borders += 1

    def before(self, name: str) -> None:
        self._pass(name)

    def after(self, name: str) -> None:
        self._pass(name)

    def write(self, file: BinaryIO, data: bytes) -> None:
        self.before("write")
        Disk.write(self, file, data[: len(data) // 2])
        self._pass("write")  # half of the bytes are there
        Disk.write(self, file, data[len(data) // 2 :])
        self.after("write")
