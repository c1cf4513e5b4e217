"""A private directory for the pages that one engine passes to another: in shared memory if there is some."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.transport.socket_directory import SocketDirectory, sweep

SHARED_MEMORY = Path("/dev/shm")


class PageDirectory:
    """The page files of one server. Removes those of killed servers first. Raises ConfigError if it cannot be made."""

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
        """Return the path of a file that is not there."""
        return self._directory.path / f"pages-{next(self._numbers)}"

    def remove(self) -> None:
        """Remove the directory and all files in it."""
        self._directory.remove()


def remove_file(path: Path) -> None:
    """Remove a file of pages, whole or half written."""
    for name in (path, path.with_name(f"{path.name}.new")):
        with contextlib.suppress(OSError):
            name.unlink()


def _default_folder() -> Path:
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())
