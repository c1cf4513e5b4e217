"""Private directories for an engine's sockets, shared state and pages, and the removal of those of killed servers.

The process that holds the lock on the file `state` owns the directory. The kernel releases the lock when the process
ends. The lock is also seen by processes in other containers that share the temporary folder.

A `PageDirectory` is for the pages that one engine passes to another. It is in shared memory if there is some.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.transport.shared_state import SharedState

PREFIX = "jaxserve-engine-"
STATE = "state"
MAX_FOLDER = 64  # bytes of the temporary folder's path; a socket's whole path may have 103 bytes on some systems
_NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # as tempfile.mkdtemp makes them


class SocketDirectory:
    """A new directory of mode 0700 with a file `state`, locked by this process until `remove`. Raises ConfigError.

    folder: where to make it; None: in the temporary folder, which is short enough for the paths of sockets
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = Path(_new_directory() if folder is None else tempfile.mkdtemp(prefix=PREFIX, dir=folder))
        new = self.path / f"{STATE}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        SharedState.create(self._lock)
        with contextlib.suppress(OSError):  # on a file system without locks `sweep` removes nothing either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self.path / STATE)  # after locking, because `sweep` only looks at directories with this file
        self.state = SharedState(self.path / STATE)

    def remove(self) -> None:
        self.state.close()
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a private directory in the temporary folder for the time of a `with` block. Raises OSError.

    If this process is killed, `sweep` of the next engine that starts on this machine removes it.
    """
    directory = SocketDirectory(Path(tempfile.gettempdir()))
    try:
        yield directory.path
    finally:
        directory.remove()


def _new_directory() -> str:
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MAX_FOLDER:
        raise ConfigError(
            f"the temporary folder's path is too long for sockets in it (more than {MAX_FOLDER} bytes): {folder}",
            fix="set TMPDIR to a shorter one",
        )
    try:
        return tempfile.mkdtemp(prefix=PREFIX)
    except OSError as error:
        raise ConfigError(f"the temporary folder cannot be used: {error}", fix="set TMPDIR to another one") from error


def sweep(folder: Path | None = None) -> list[Path]:
    """Remove this user's directories whose process is gone. Return the removed paths.

    folder: where to look; None: in the temporary folder
    """
    swept = [path for path in _candidates(folder or Path(tempfile.gettempdir())) if _is_abandoned(path)]
    for path in swept:
        shutil.rmtree(path, ignore_errors=True)
    return swept


def _candidates(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                        yield Path(entry.path)


def _is_abandoned(directory: Path) -> bool:
    """Return whether the lock of a directory is free. One without the file is being made by another process."""
    try:
        descriptor = os.open(directory / STATE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


SHARED_MEMORY = Path("/dev/shm")


class PageDirectory:
    """The directory of a server's page files. Removes directories of killed servers first. Raises ConfigError."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: where to make it; None: in shared memory, or in the temporary folder"""
        self.folder = folder or _default_folder()
        sweep(self.folder)
        try:
            self._directory = SocketDirectory(self.folder)
        except OSError as error:
            raise ConfigError(f"no directory for pages can be made in {self.folder}: {error.strerror}") from error
        self._numbers = itertools.count()

    def new_file(self) -> Path:
        """Return the path of a file that does not exist yet."""
        return self._directory.path / f"pages-{next(self._numbers)}"

    def remove(self) -> None:
        """Remove the directory and all files in it."""
        self._directory.remove()


def remove_file(path: Path) -> None:
    """Remove a file of pages, completely written or not."""
    for name in (path, path.with_name(f"{path.name}.new")):
        with contextlib.suppress(OSError):
            name.unlink()


def _default_folder() -> Path:
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())
