"""The cache of compiled programs on disk, shared by all processes of a user.

JAX writes a cache entry in place and never rewrites it. A second process could read a partial entry, and the entry
would stay partial if the first process is killed. Each process therefore gives JAX a private directory inside the
shared one, filled with hard links to the shared entries. `share` links new, complete entries into the shared directory.
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

_OWN = "process-"  # prefix of a process's private directory
_ENTRY = "*-cache"  # names of JAX's cache entries


def enable(directory: Path) -> None:
    """Cache compiled programs of any size in `directory`. Applies to the whole process; may be called again.

    Raises CacheDirectoryError if another user could write there, because JAX runs what it reads from the cache.
    """
    with opened(directory):
        pass  # checks that no other user can replace a directory on the path
    own = _own(directory.absolute()) or _new_own(directory.absolute())
    _link_all(directory, own)
    compilation_cache.reset_cache()  # otherwise JAX keeps using its first directory
    jax.config.update("jax_compilation_cache_dir", str(own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # The directory of XLA's own caches would be part of each entry's key, and it differs per process.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def share() -> None:
    """Make this process's compiled programs available to other processes. Does nothing if `enable` was not called."""
    now = _now()
    if now is not None and now.name.startswith(_OWN):
        _link_all(now, now.parent)


def _own(directory: Path) -> Path | None:
    """Return this process's private directory inside `directory`, None if it has none yet."""
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
        with contextlib.suppress(OSError):  # on a file system without locks `_remove_if_left` removes nothing either
            fcntl.flock(os.open(own, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the process ends
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
    """Remove a private directory whose process has ended. A running process holds its lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(own, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(own, ignore_errors=True)
        finally:
            os.close(descriptor)


def _link_all(source: Path, target: Path) -> None:
    """Link all entries that `target` lacks. Errors, for example a full disk, are ignored: the cache is optional."""
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
