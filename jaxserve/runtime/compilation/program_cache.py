"""The cache of compiled programs on disk, shared by all processes of a user.

JAX writes a cache entry in place and never rewrites it. A second process could read a partial entry, and the entry
would stay partial if the first process is killed. Each process therefore gives JAX a private directory inside the
shared one, filled with hard links to the shared entries. `share` links new, complete entries into the shared directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.system import opened

logger = logging.getLogger(__name__)

_OWN = "process-"  # prefix of a process's private directory
_ENTRY = "*-cache"  # names of JAX's cache entries
_ZSTD = b"\x28\xb5\x2f\xfd"  # the beginning of an entry if JAX found a zstd module; otherwise it is in zlib's form


def enable(directory: Path) -> None:
    """Cache compiled programs of any size in `directory`. Applies to the whole process; may be called again.

    Raises CacheDirectoryError if another user could write there, because JAX runs code from the cache.
    """
    with opened(directory):
        pass  # checks that no other user can replace a directory on the path
    directory = directory.resolve()
    try:
        used = _own(directory) or _new_own(directory)
        _link_all(directory, used)
    except OSError as error:
        logger.warning("new compiled programs are not kept: %s cannot be written (%s)", directory, error.strerror)
        used = directory
    compilation_cache.reset_cache()  # otherwise JAX keeps using its first directory
    jax.config.update("jax_compilation_cache_dir", str(used))
    jax.config.update("jax_compilation_cache_max_size", -1)  # links have no time of access, which a limit would read
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # The directory of XLA's own caches would be part of each entry's key, and it differs per process.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Compile everything anew in the body. XLA's CPU client cannot serialize a program that came from the cache."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def share() -> None:
    """Make this process's compiled programs available to other processes. Does nothing if `enable` was not called."""
    now = _now()
    if now is not None and now.name.startswith(_OWN):
        _link_all(now, now.parent, check=True)


def _own(directory: Path) -> Path | None:
    """Return this process's private directory inside `directory`, None if it has none yet."""
    now = _now()
    if now is None or now.parent != directory or not now.name.startswith(_OWN):
        return None
    return now if now.is_dir() else None


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


def _link_all(source: Path, target: Path, *, check: bool = False) -> None:
    """Link all entries that `target` lacks. Errors, for example a full disk, are ignored: the cache is optional.

    check: leave out incomplete entries, because JAX reports no error if it cannot write a whole one
    """
    there = {path.name for path in target.glob(_ENTRY)}
    for path in source.glob(_ENTRY):
        if path.name not in there:
            with contextlib.suppress(OSError):
                if not check or _is_complete(path.read_bytes()):
                    _link(path, target / path.name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        whole = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            shutil.copyfile(source, whole)
            whole.rename(target)
        finally:
            whole.unlink(missing_ok=True)


def _is_complete(entry: bytes) -> bool:
    try:
        if entry.startswith(_ZSTD):
            importlib.import_module("zstandard").ZstdDecompressor().decompress(entry)
        else:
            zlib.decompress(entry)
    except ImportError:
        return True  # written by another module than zstandard: not checked
    except Exception:
        return False
    return True
