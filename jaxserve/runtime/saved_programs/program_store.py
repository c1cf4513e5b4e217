"""Stores compiled programs in the user's cache directory, by a key of everything that they depend on.

A program that is found there is loaded instead of traced and compiled, which takes a tenth of the time. The files are
code: a file is read only if it belongs to this user or to root and no other user can write it, and each has a checksum.
Beyond KEPT bytes the least recently used files are removed. Processes that start together compile each program once.
A program that cannot be loaded or run is removed and compiled again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec

from jaxserve.errors import ConfigError
from jaxserve.runtime.compilation.compiler import Program, ProgramStorage, obtain
from jaxserve.runtime.fingerprint import describe, fingerprint
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.saved_programs.executable import (
    ProgramFormatError,
    StoredProgram,
    UnrunnableProgramError,
    lacks_function,
    load,
    serialize,
)
from jaxserve.system import CacheDirectoryError, opened

SUFFIX = ".program"
MAGIC = b"jaxserve program 1\n"
_DIGEST = 32  # bytes of SHA-256
LIMIT = 4 * 2**30  # bytes; a larger file is refused before it is read
KEPT = 4 * 2**30  # bytes of all programs together; the demo model's have 12 MB
# Not made by each thread that reads a program: msgspec ends a process in which two threads meet nested types at once.
_PROGRAM = msgspec.msgpack.Decoder(StoredProgram)
WAIT = 300.0  # seconds to wait for a program that another process compiles
LOCK_INTERVAL = 0.05  # seconds between two looks at its lock
UNFINISHED = 86400.0  # seconds after which a temporary file counts as left by a killed process

logger = logging.getLogger(__name__)


class ProgramStore:
    """The store in a directory of the user's cache. Errors only cost time: the program is then compiled.

    most: bytes that are kept
    """

    def __init__(self, directory: Path, mesh: DeviceMesh, most: int = KEPT) -> None:
        """Open the store. Raises CacheDirectoryError if another user could write to the directory."""
        with opened(directory):
            pass
        self._directory, self._most = directory, most
        self._fingerprint = fingerprint(mesh)
        self._loaded: dict[str, str] = {}  # the program's name by its file's

    def find(self, program: Program) -> jax.stages.Compiled | None:
        """Load a program, see compiler.ProgramStorage."""
        name = f"{program_key(program, self._fingerprint)}{SUFFIX}"
        try:
            with opened(self._directory) as held:
                data = read_code(held.descriptor, name)
                with contextlib.suppress(OSError):  # a cache that cannot be written
                    os.utime(name, dir_fd=held.descriptor, follow_symlinks=False)  # its time of use
            found = load(decode(data), program)
        except FileNotFoundError:
            return None
        except ProgramFormatError as error:
            logger.warning("%s is compiled again: %s: %s", program.name, self._directory / name, error)
            self._remove([name])
            return None
        except (OSError, CacheDirectoryError) as error:
            logger.warning("%s is compiled again: %s: %s", program.name, self._directory / name, error)
            return None
        self._loaded[name] = program.name
        return found

    def keep(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Store a program, see compiler.ProgramStorage."""
        name = f"{program_key(program, self._fingerprint)}{SUFFIX}"
        try:
            with opened(self._directory) as held:
                write_code(held.descriptor, name, encode(serialize(compiled)))
                remove_unused(held.descriptor, self._most)
        except (OSError, CacheDirectoryError, ProgramFormatError) as error:
            logger.info("%s is not kept: %s", program.name, error)

    def discard(self) -> list[str]:
        """Remove the programs that this process loaded, see compiler.ProgramStorage."""
        removed, self._loaded = self._loaded, {}
        self._remove(removed)
        return sorted(removed.values())

    def _remove(self, names: Iterable[str]) -> None:
        with contextlib.suppress(OSError, CacheDirectoryError), opened(self._directory) as held:
            for name in names:
                with contextlib.suppress(OSError):  # another process removed it, or the cache cannot be written
                    os.unlink(name, dir_fd=held.descriptor)

    @contextlib.contextmanager
    def turn(self, program: Program, seconds: float) -> Iterator[bool]:
        """Hold a program's lock if it is free within `seconds`. Yields whether it was not free at once."""
        name = f".{program_key(program, self._fingerprint)}.lock"
        with contextlib.ExitStack() as stack:
            try:
                directory = stack.enter_context(opened(self._directory)).descriptor
                lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
            except (OSError, CacheDirectoryError):  # a cache that cannot be written
                yield False
                return
            stack.callback(os.close, lock)
            has_waited, has_lock = _locked(lock, seconds)
            try:
                yield has_waited
            finally:
                if has_lock:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=directory)


class TurnTakingStore:
    """A store whose programs are compiled by one process at a time, while the others that need them wait.

    So engines that start together compile each program once. The lock is the operating system's: it ends with its
    holder. seconds: how long to wait for another process's program; that process may be stopped, or its disk full
    """

    def __init__(self, store: ProgramStore, seconds: float = WAIT) -> None:
        self._store = store
        self._seconds = seconds

    def find(self, program: Program) -> jax.stages.Compiled:
        """Load a program, or compile it here, or wait until another process has compiled it."""
        if (found := self._store.find(program)) is not None:
            return found
        with self._store.turn(program, self._seconds) as has_waited:
            found = self._store.find(program)
            if found is None and has_waited:
                self._seconds = 0.0  # the other process did not store it, so waiting for the next one is useless too
            return found or obtain(program, self._store)

    def keep(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Never called: `find` returns a program or raises."""
        raise AssertionError(program.name)

    def discard(self) -> list[str]:
        """Remove the programs that this process loaded, see compiler.ProgramStorage."""
        return self._store.discard()


@contextlib.contextmanager
def discarding(store: ProgramStorage | None) -> Iterator[None]:
    """Discard the programs of the store if one of them cannot be run in the body. Then raises UnrunnableProgramError.

    XLA does not say which program it was, so all that were loaded are discarded.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if store is None or not lacks_function(error) or not (names := store.discard()):
            raise
        text = f"a stored program cannot be run ({error}); {len(names)} are discarded: {', '.join(names)}"
        raise UnrunnableProgramError(text) from error


def program_key(program: Program, made_for: Mapping[str, str]) -> str:
    """Return the name of a program among all programs of all models and machines: 40 hexadecimal digits."""
    arguments, tree = jax.tree.flatten(program.args)
    out = [describe(leaf) for leaf in jax.tree.leaves(program.out_shardings)]
    # without arguments only its results say its shapes: the number of pages, for the program that makes the cache
    results = [] if arguments else [describe(leaf) for leaf in jax.tree.leaves(jax.eval_shape(program.function))]
    parts: list[Any] = [program.name, program.identity, sorted(made_for.items()), list(map(describe, arguments))]
    parts += [str(tree), program.donate, out, results, sorted(program.options.items())]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


def _locked(descriptor: int, seconds: float) -> tuple[bool, bool]:
    """Wait for a lock, with a limit in seconds. Returns whether it was not free at once, and whether it is held now."""
    deadline, has_waited = time.monotonic() + seconds, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return has_waited, True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return has_waited, False
        except OSError:  # a file system without locks
            return has_waited, False
        has_waited = True
        time.sleep(LOCK_INTERVAL)


def encode(stored: StoredProgram) -> bytes:
    """Return the content of a program's file: magic line, checksum, MessagePack."""
    body = msgspec.msgpack.encode(stored)
    return MAGIC + hashlib.sha256(body).digest() + body


def decode(data: bytes) -> StoredProgram:
    """Return the program of a file. Raises ProgramFormatError if it is truncated, changed or of another kind."""
    start = len(MAGIC) + _DIGEST
    if not data.startswith(MAGIC):
        raise ProgramFormatError("it is not a file of a program")
    if hashlib.sha256(memoryview(data)[start:]).digest() != data[len(MAGIC) : start]:
        raise ProgramFormatError("its checksum is wrong: the file was cut or changed")
    try:
        return _PROGRAM.decode(memoryview(data)[start:])
    except msgspec.MsgspecError as error:
        raise ProgramFormatError(f"it cannot be read: {error}") from error


def read_code(directory: int, name: str) -> bytes:
    """Read a file of code from an open, checked directory.

    Raises CacheDirectoryError if another user could have written it, OSError if it cannot be read.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > LIMIT:
            raise CacheDirectoryError(f"{name} is not a file, or too large")
        if info.st_uid not in (os.geteuid(), 0):
            raise CacheDirectoryError(f"{name} belongs to another user ({info.st_uid})", fix="make the bundle yourself")
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CacheDirectoryError(f"other users can write to {name}", fix=f"chmod go-w {name}, if nobody did")
        return file.read()


def write_code(directory: int, name: str, data: bytes) -> None:
    """Write a file under a temporary name and rename it, so that no reader sees half of it. Raises OSError."""
    temporary = f".{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def remove_unused(directory: int, most: int) -> None:
    """Remove the files that were used least recently until the others have at most `most` bytes, and unfinished ones.

    directory: open and checked. A program that another process has open stays readable there.
    """
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        files: list[tuple[os.stat_result, str]] = []
        with os.scandir(descriptor) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a lock whose holder is done, or what another removed
                    files.append((entry.stat(follow_symlinks=False), entry.name))
        room = most
        for info, name in sorted(files, key=lambda file: -file[0].st_mtime):
            is_left = name.startswith(".") and time.time() - info.st_mtime > UNFINISHED
            room -= info.st_size
            if is_left or (room < 0 and name.endswith(SUFFIX)):
                with contextlib.suppress(OSError):  # another process removed it
                    os.unlink(name, dir_fd=directory)
    finally:
        os.close(descriptor)


def open_store(directory: Path | None, mesh: DeviceMesh) -> TurnTakingStore | None:
    """Return the store beside JAX's cache in `directory`; None if there is no cache, or it cannot be written."""
    if directory is None:
        return None
    try:
        return TurnTakingStore(ProgramStore(directory / "programs", mesh))
    except ConfigError as error:
        logger.warning("compiled programs are not kept: %s", error)
        return None
