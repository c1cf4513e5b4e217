"""Compiled programs on disk, shared by the processes of a user, for the next start.

JAX writes an entry in place and never writes it again. A second process could read half of it, and half of it would
stay for ever if the first one is killed. So each process gives JAX a directory of its own, inside the shared one and
filled with links to the shared entries; `share` adds what was compiled since to the shared ones, each whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.cache_directory import opened

_OWN = "process-"  # what the name of a process's directory begins with
_ENTRY = "*-cache"  # JAX's files


def enable(directory: Path) -> None:
    """Keep compiled programs in `directory`, whatever their size. Process-wide, as JAX's cache is; safe to call again.

    Raises CacheDirectoryError if another user could put programs there: what JAX reads back is run.
    """
    with opened(directory):
        pass  # nobody else can exchange a directory on a path that was found safe
    own = _own(directory.absolute()) or _new_own(directory.absolute())
    _link_all(directory, own)
    compilation_cache.reset_cache()  # JAX would stay with the first directory that it used
    jax.config.update("jax_compilation_cache_dir", str(own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Its path would be a part of each entry's key, and differs from process to process.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def share() -> None:
    """Let later processes have what this one has compiled. Does nothing if `enable` was not called."""
    now = _now()
    if now is not None and now.name.startswith(_OWN):
        _link_all(now, now.parent)


def _own(directory: Path) -> Path | None:
    """The directory inside `directory` that this process has already."""
    now = _now()
    return now if now is not None and now.parent == directory and now.is_dir() else None


def _now() -> Path | None:
    path = jax.config.values["jax_compilation_cache_dir"]
    return None if path is None else Path(path)


def _new_own(directory: Path) -> Path:
    with _locked(directory):
        for left in directory.glob(f"{_OWN}*"):
            _remove_if_left(left)
        own = Path(tempfile.mkdtemp(prefix=_OWN, dir=directory))
        with contextlib.suppress(OSError):  # a file system without locks: then nothing is removed there either
            fcntl.flock(os.open(own, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # open until the process ends
    return own


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_left(own: Path) -> None:
    """Remove the directory of a process that has ended: whoever lives holds its lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(own, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(own, ignore_errors=True)
        finally:
            os.close(descriptor)


def _link_all(source: Path, target: Path) -> None:
    """A cache is a gain only: what a full disk or another process prevents is left out."""
    there = {path.name for path in target.glob(_ENTRY)}
    for path in source.glob(_ENTRY):
        if path.name not in there:
            with contextlib.suppress(OSError):
                _link(path, target / path.name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        whole = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(source, whole)
        whole.rename(target)
