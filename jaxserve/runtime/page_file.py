"""A file of KV pages that outlives the process, so that a new one finds the prefixes of the old one.

The file has a record for each slot: the digest of the page's prefix and a checksum of digest and content. A thread
writes the record after the content; until then the slot counts as empty. At the start a thread reads all pages and
reports the pages that match their record's checksum. So a page or record that was half written, or changed on the disk,
is lost and never used. If the file is truncated while it is open, it is recreated, and all its pages are lost.

The file's name depends on the model, its weights and the form of a page. Other page files in the directory are removed,
unless a running server has them open. A file counts as a page file only if it begins like one that was made here.

A process that opens a file by its name locks it, and then checks that the name still belongs to this file: another
process may have removed it in between. Only the owner of the lock removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import mmap
import os
import stat
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.model_files import gguf_parts
from jaxserve.system import CacheDirectoryError, OpenDirectory, opened

_RECORD = np.dtype([("digest", np.uint8, 32), ("checksum", np.uint32), ("used", np.uint32)])
_SUFFIX = ".pages"
_HEAD = b"jaxserve pages 2"  # the first bytes of a file
_CLAIM_TRIES = 100  # to lock a file, 10 ms apart: a server that starts locks the files of other models to remove them
_FIX = "choose another directory, a smaller cache.host_memory, or leave cache.disk out"


@dataclass(frozen=True)
class PageFileConfig:
    """The directory that keeps pages after the process. fingerprint: of model, weights and form of a page"""

    directory: Path
    fingerprint: str

    def of_group(self, group: int) -> PageFileConfig:
        """Return the configuration for a layer group. Each from 1 on has a folder of its own."""
        return dataclasses.replace(self, directory=self.directory / group_folder(group)) if group else self


def group_folder(group: int) -> str:
    """Return the name of the folder of a layer group from 1 on."""
    return "window" if group == 1 else f"window-{group}"


class PageFile:
    """Slots of `page_bytes` in a file of `config.directory`. Raises ConfigError if the file cannot be used.

    rows       the content: uint8 [num_slots, page_bytes]
    checked    (slot, digest) of pages of an earlier process, or (slot, None) if the content was lost, also of pages of
               this process; grows meanwhile
    to_check   slots that will appear in `checked`
    """

    def __init__(self, config: PageFileConfig, num_slots: int, page_bytes: int) -> None:
        before = mmap.PAGESIZE * (1 + -(-num_slots * _RECORD.itemsize // mmap.PAGESIZE))  # the head and the records
        self._size = size = before + num_slots * page_bytes
        name = f"{config.fingerprint}-{num_slots}-{page_bytes}{_SUFFIX}"
        self._file = _open(config, name, size)
        memory = mmap.mmap(self._file, size)
        self._records = np.frombuffer(memory, _RECORD, num_slots, mmap.PAGESIZE)
        rows = np.frombuffer(memory, np.uint8, num_slots * page_bytes, before)
        self.rows = rows.reshape(num_slots, page_bytes)
        self.to_check: list[int] = np.flatnonzero(self._records["used"]).tolist()
        self.checked: deque[tuple[int, bytes | None]] = deque()
        self._lock = threading.Lock()  # held to change `used`
        self._versions = np.zeros(num_slots, np.uint64)  # of the content; counts changes since the start
        self._written: SimpleQueue[tuple[int, int, bytes] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv page file", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise OSError if the file was truncated; it is then recreated, and all its pages are lost.

        Call it before `rows` are used: the system kills a process that reads memory beyond the file's end.
        """
        if self._is_whole():
            return
        os.posix_fallocate(self._file, 0, self._size)
        os.pwrite(self._file, _HEAD, 0)
        self.clear()
        self.checked.extend((slot, None) for slot in range(len(self.rows)))
        raise OSError("the file of cache.disk was cut while it was open, and its pages are lost")

    def begin(self, slots: list[int]) -> None:
        """Record that the content of distinct slots will change: until `end` they count as empty."""
        with self._lock:
            self._records["used"][slots] = 0
            self._versions[slots] += np.uint64(1)

    def end(self, slots: list[int], digests: list[bytes]) -> None:
        """Record that the content of slots is complete. The thread writes their records."""
        for slot, digest in zip(slots, digests, strict=True):
            self._written.put((slot, int(self._versions[slot]), digest))

    def clear(self) -> None:
        """Empty all slots."""
        with self._lock:
            self._records["used"] = 0
            self._versions += np.uint64(1)

    def close(self) -> None:
        """Write the records that are due and unlock the file. The content stays readable. Can be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()  # pages that are not checked yet stay as they are
        self._written.put(None)
        self._thread.join()
        fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough: the mapping has a descriptor of its own
        os.close(self._file)

    def _run(self) -> None:
        for slot in self.to_check:
            if self._closing.is_set():
                break
            self.checked.append((slot, self._sound(slot) if self._is_whole() else None))
        while (written := self._written.get()) is not None:
            if not self._is_whole():
                continue
            slot, version, digest = written
            checksum = self._checksum(slot, digest)
            self._records["digest"][slot] = np.frombuffer(digest, np.uint8)
            self._records["checksum"][slot] = checksum
            with self._lock:
                self._records["used"][slot] = self._versions[slot] == version

    def _sound(self, slot: int) -> bytes | None:
        """Return the digest of an earlier process's page; None if its content was changed or not written whole."""
        record = self._records[slot]
        digest = record["digest"].tobytes()
        return digest if record["used"] and self._checksum(slot, digest) == record["checksum"] else None

    def _is_whole(self) -> bool:
        return os.fstat(self._file).st_size >= self._size

    def _checksum(self, slot: int, digest: bytes) -> int:
        return zlib.crc32(self.rows[slot], zlib.crc32(digest))


def fingerprint(model: Path, *form: object) -> str:
    """Return a name for the pages of a model. It changes if the model's files or `form` change.

    model: directory or file of the checkpoint. form: everything else that determines the content of a page
    """
    files = sorted(path for path in model.iterdir() if path.is_file()) if model.is_dir() else gguf_parts(model)
    stats = [(path.name, *_state(path.stat())) for path in files]
    return hashlib.sha256(repr((str(model.resolve()), stats, form)).encode()).hexdigest()[:32]


def _state(info: os.stat_result) -> tuple[int, ...]:
    """Return values that change with a file's content. Files of images and archives may all have one `mtime`."""
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _open(config: PageFileConfig, name: str, size: int) -> int:
    """Open and lock the file, with room for `size` bytes. Removes files of other models."""
    try:
        with opened(config.directory) as directory:
            _remove_all(directory, but=name)
            file = _claimed(name, directory.descriptor)
            try:
                os.posix_fallocate(file, 0, size)  # a write to a page without room would end the process
            except OSError as error:
                os.unlink(name, dir_fd=directory.descriptor)
                os.close(file)
                raise ConfigError(f"cache.disk: no room for {size} bytes: {error.strerror}", fix=_FIX) from None
    except CacheDirectoryError as error:
        raise ConfigError(f"cache.disk: {error}", fix=_FIX) from None
    except OSError as error:
        raise ConfigError(f"cache.disk: {config.directory}: {error.strerror}", fix=_FIX) from None
    return file


def _claimed(name: str, directory: int) -> int:
    """Open and lock a page file; make it if needed. Raises ConfigError if it is in use, or another kind of file."""
    for _ in range(_CLAIM_TRIES):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        try:
            if _locks(file, name, directory):
                _begin(file, name)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(0.01)
    raise ConfigError("cache.disk: another server uses this directory for the same model", fix=_FIX)


def _begin(file: int, name: str) -> None:
    """Write the first bytes of a locked file. Raises ConfigError if it was not made here."""
    if os.fstat(file).st_size and not _is_ours(file):
        raise ConfigError(f"cache.disk: {name} is there and no file of KV pages", fix=_FIX)
    os.pwrite(file, _HEAD, 0)


def remove_unused(directory: Path, replicas: int) -> None:
    """Remove the page files that a server with another number of engines has left in `cache.disk`.

    directory: of one engine. With several each has a folder engine-N of `cache.disk`, N from 0
    """
    kept = {f"engine-{index}" for index in range(replicas)} if replicas > 1 else set[str]()
    root = directory.parent if kept else directory
    folders = [folder for folder in root.glob("engine-*") if folder.name not in kept]
    for folder in (*folders, root) if kept else folders:
        remove_files(folder)
        for of_group in folder.glob("window*"):
            remove_files(of_group)


def remove_files(directory: Path) -> None:
    """Remove the page files of a directory, if it can be used, except the files of running servers."""
    with contextlib.suppress(CacheDirectoryError, OSError):
        if directory.is_dir():
            with opened(directory) as found:
                _remove_all(found)


def _remove_all(directory: OpenDirectory, but: str = "") -> None:
    for name in os.listdir(directory.file(".")):
        if name.endswith(_SUFFIX) and name != but:
            _remove(name, directory.descriptor)


def _remove(name: str, directory: int) -> None:
    """Remove a page file unless a running server has it open. Files that were not made here stay."""
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            return
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
        try:
            if _is_ours(file) and _locks(file, name, directory):
                os.unlink(name, dir_fd=directory)
        finally:
            os.close(file)


def _is_ours(file: int) -> bool:
    return os.pread(file, len(_HEAD), 0) == _HEAD


def _locks(file: int, name: str, directory: int) -> bool:
    """Lock an open file. Returns False if another process has locked it, or if `name` is another file by now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), os.stat(name, dir_fd=directory, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False
