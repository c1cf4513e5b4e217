"""One store directory, one server: an advisory lock that the kernel drops when its process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from jaxserve.errors import ConfigError


class DirectoryLock:
    """Hold `<directory>/lock` until `release`. Raises ConfigError if another process holds it."""

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
