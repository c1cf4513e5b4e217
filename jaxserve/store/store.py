"""The store of one server: a directory with a SQLite database and the bytes of files beside it.

    jaxserve-store marks the directory as a store and holds its version
    lock           held while a server runs
    store.db       files, batches, results, responses, conversations, threads, adapters, lease, idempotency keys
    files/<id>     bytes; written once, never changed
    tmp/           unfinished files; removed at start

A crash can leave bytes without a row or a row without bytes. Opening the store removes both. Files that the store did
not make are left alone. No code outside this folder uses SQL.

`write_results` writes a finished batch's output and error files from the stored results, in the order of the input. A
line without a result (the batch expired or was cancelled) goes to the error file, in the words of `missing_line`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from jaxserve.errors import ConfigError, InvalidValueError, NotFoundError, StorageError, StoreDamagedError
from jaxserve.store import batches, files
from jaxserve.store.database import Database, DirectoryLock, StoreCondition
from jaxserve.store.directory import (
    DATABASE,
    FILES,
    TMP,
    Disk,
    PendingFile,
    check_usable,
    is_full,
    mark,
    own_files,
    storage_error,
)
from jaxserve.store.jsonl import read_lines
from jaxserve.store.records import (
    MAX_EXPIRY_SECONDS,
    BatchError,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineResult,
    ListQuery,
    NewBatch,
    Page,
)
from jaxserve.store.responses import ResponseStore
from jaxserve.store.threads import ThreadLimits, ThreadStore
from jaxserve.store.validation import BATCH_LINE

MissingLine = Callable[[str], bytes]  # custom_id -> the line of the error file, without the newline

PAGE_LINES = 256


class OutputFiles:
    """The two files of one batch while they are written. Each exists only if it has a line."""

    def __init__(self, output: Callable[[], PendingFile], errors: Callable[[], PendingFile]) -> None:
        self._open = {True: output, False: errors}
        self._files: dict[bool, PendingFile] = {}

    @property
    def output(self) -> PendingFile | None:
        return self._files.get(True)

    @property
    def errors(self) -> PendingFile | None:
        return self._files.get(False)

    def write(self, succeeded: bool, payload: bytes) -> None:
        if succeeded not in self._files:
            self._files[succeeded] = self._open[succeeded]()
        self._files[succeeded].write(payload + b"\n")

    def publish(self) -> None:
        for file in self._files.values():
            file.publish()

    def discard(self) -> None:
        """Forget the files that are not published.

        A published file stays: if the commit that was to name it failed, only the next start knows whether it counts,
        and until then a new attempt puts the same file in its place.
        """
        for file in self._files.values():
            file.discard(published=False)


def write_results(
    files: OutputFiles,
    connection: sqlite3.Connection,
    batch_id: str,
    input_path: Path,
    max_line_bytes: int,
    missing_line: MissingLine | None,
) -> None:
    """Copy every result and, with `missing_line`, write every line that has none."""
    results = stored_results(connection, batch_id)
    if missing_line is None:
        for _, succeeded, payload in results:
            files.write(succeeded, payload)
        return
    result = next(results, None)
    for line in read_lines(input_path, max_line_bytes):
        if result is not None and result[0] == line.number:
            files.write(result[1], result[2])
            result = next(results, None)
        elif line.data is not None:
            files.write(False, missing_line(BATCH_LINE.decode(line.data).custom_id))


def stored_results(connection: sqlite3.Connection, batch_id: str) -> Iterator[tuple[int, bool, bytes]]:
    """Yield (line, succeeded, payload) in order of lines, with one page in memory at a time."""
    last = 0
    while page := batches.results_after(connection, batch_id, last, PAGE_LINES):
        yield from page
        last = page[-1][0]


SWEEP_ROWS = 2000  # results removed in one transaction, so that no write waits long


class Store:
    """Files and batches; responses and conversations are in `responses`, threads of Messages in `threads`.

    A write is durable when it returns, and has changed nothing if it raises StorageError. Lists are in order of
    creation. They neither skip nor repeat an object while others are added or deleted.

    owner: the API key that asks, "" for the default key, which sees only its own objects; None: see all
    clock: returns Unix seconds. thread_limits: limits on the time and size of stored threads

    Raises NotFoundError for unknown ids, StorageError if the disk refuses, StoreDamagedError if stored data is damaged;
    after that nothing is written. The constructor raises ConfigError if the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
        thread_limits: ThreadLimits | None = None,
    ) -> None:
        self.disk = disk or Disk()
        self._clock = clock
        self._directory = directory
        self._files = directory / FILES
        self._tmp = directory / TMP
        with _usable(directory):
            check_usable(directory)
            for path in (directory, self._files, self._tmp):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = DirectoryLock(directory)
        try:
            with _usable(directory):
                mark(directory, self.disk)
            self._database = Database(directory / DATABASE, self.disk)
            self.responses = ResponseStore(self._database, self.now)
            self.threads = ThreadStore(self._database, self.now, thread_limits or ThreadLimits())
        except BaseException:
            self._lock.release()
            raise
        try:
            with _usable(directory):
                self._recover()
        except BaseException:
            self._database.close()
            self._lock.release()
            raise

    @property
    def condition(self) -> StoreCondition:
        """Return whether the store can be written, as of the latest write."""
        return self._database.condition.now

    @property
    def directory(self) -> Path:
        return self._directory

    def now(self) -> int:
        return int(self._clock())

    def _recover(self) -> None:
        for path in own_files(self._directory, TMP):
            self.disk.unlink(path)
        on_disk = {path.name for path in own_files(self._directory, FILES)}
        known = self._database.write_now(files.stored_ids)
        for name in on_disk - known:
            self.disk.unlink(self._files / name)
        if lost := known - on_disk:
            self._database.write_now(files.mark_lost, sorted(lost), self.now())

    # adapters that are loaded again at the next start

    async def keep_adapter(self, name: str, body: bytes) -> None:
        """Keep JSON under the name of an adapter."""
        await self._database.write(_keep_adapter, name, body)

    async def forget_adapter(self, name: str) -> bool:
        """Return whether an adapter of this name was kept until now."""
        return await self._database.write(_forget_adapter, name)

    async def kept_adapters(self) -> list[bytes]:
        """Return the JSON of all kept adapters, in order of their names."""
        return await self._database.read(_kept_adapters)

    # files

    def begin_upload(self) -> Upload:
        return Upload(self, self._new_file(secrets.token_hex(12)))

    def _new_file(self, name: str) -> PendingFile:
        return PendingFile(self.disk, self._tmp / secrets.token_hex(12), self._files / f"file-{name}")

    def _output_file(self, batch_id: str, kind: str) -> PendingFile:
        """Return a pending output file whose name depends on the batch, the kind and this server process.

        Repeated attempts on a full disk reuse the name and do not pile up. Another server process uses another name, so
        a server that lost its lease cannot change the output of its successor.
        """
        name = f"{batch_id}:{kind}:{self._database.epoch}"
        return self._new_file(blake2b(name.encode(), digest_size=12).hexdigest())

    async def insert_file(self, file: FileRecord) -> None:
        await self._database.write(files.insert_file, file)

    async def get_file(self, file_id: str, *, owner: str | None = None) -> FileRecord:
        return await self._database.read(files.get_file, file_id, self.now(), owner)

    async def list_files(
        self,
        *,
        purpose: str | None = None,
        limit: int,
        after: str | None = None,
        ascending: bool = False,
        owner: str | None = None,
    ) -> Page[FileRecord]:
        """Return a page of files of one purpose, or of all."""
        query = ListQuery(limit, after, ascending, owner)
        return await self._database.read(files.list_files, query, purpose, self.now())

    async def delete_file(self, file_id: str, *, owner: str | None = None) -> None:
        """Hide a file and remove its bytes. Raises NotFoundError and StorageError."""
        try:
            await self._database.write(files.delete_file, file_id, self.now(), owner)
        except StorageError:
            # A full disk has no room to record the deletion before the bytes are removed.
            if not await self._database.read(files.may_remove, file_id, self.now(), owner):
                raise
            _raise_of(await asyncio.to_thread(self._unlink_files, [file_id]))
            await self._database.write(files.delete_file, file_id, self.now(), owner)
        left = await self._remove_bytes()
        _raise_of({name: error for name, error in left.items() if name == file_id})

    async def open_file(self, file_id: str, *, owner: str | None = None) -> tuple[FileRecord, BinaryIO]:
        """Return the file and its bytes, which stay readable if it is deleted meanwhile. The caller closes them.

        Raises NotFoundError and StorageError.
        """
        record = await self.get_file(file_id, owner=owner)
        try:
            return record, open(self._files / record.id, "rb")
        except FileNotFoundError as error:
            raise files.no_such_file(file_id) from error
        except OSError as error:
            raise storage_error(error) from error

    # batches

    async def create_batch(
        self, new: NewBatch, *, idempotency: tuple[str, bytes] | None, reply: Callable[[BatchRecord], bytes]
    ) -> tuple[bytes, BatchRecord | None]:
        """Create a batch of `new.owner` and keep `reply(record)` as the answer to its calls with one idempotency key.

        idempotency: the client's key and a digest of its request
        Returns the answer, and the record unless the answer is an earlier call's.
        """
        batch_id = f"batch_{secrets.token_hex(12)}"
        return await self._database.write(_create_batch, batch_id, new, idempotency, reply, self.now())

    async def get_batch(self, batch_id: str, *, owner: str | None = None) -> BatchRecord:
        return await self._database.read(batches.get_batch, batch_id, owner)

    async def list_batches(
        self, *, limit: int, after: str | None = None, owner: str | None = None
    ) -> Page[BatchRecord]:
        return await self._database.read(batches.list_batches, ListQuery(limit, after, owner=owner))

    async def cancel_batch(self, batch_id: str, *, owner: str | None = None) -> BatchRecord:
        return await self._database.write(batches.cancel, batch_id, self.now(), owner)

    # batches, as the batch runner uses them; False or None means that the batch has left the expected state

    async def live_batches(self) -> list[str]:
        return await self._database.read(batches.live_batches)

    def input_path(self, batch: BatchRecord) -> Path:
        """Return the path of the input file, readable until the batch has ended even if its owner deleted it."""
        return self._files / batch.input_file_id

    async def start_batch(self, batch_id: str, total: int, model: str | None) -> bool:
        return await self._database.write(batches.start, batch_id, total, model, self.now())

    async def fail_batch(self, batch_id: str, source: BatchStatus, errors: Sequence[BatchError]) -> bool:
        return await self._database.write(batches.fail, batch_id, source, errors, self.now())

    async def move_batch(self, batch_id: str, source: BatchStatus, target: BatchStatus) -> bool:
        return await self._database.write(batches.move, batch_id, source, target, self.now())

    async def add_results(self, batch_id: str, results: Sequence[LineResult]) -> None:
        await self._database.write(batches.add_results, batch_id, results)

    async def finished_lines(self, batch_id: str) -> set[int]:
        return await self._database.read(batches.finished_lines, batch_id)

    async def publish_batch(
        self,
        batch: BatchRecord,
        target: BatchStatus,
        *,
        max_line_bytes: int,
        missing_line: MissingLine | None,
    ) -> BatchRecord | None:
        """Write the output files and the final state, all or nothing. Return None if `move_batch` would return False.

        max_line_bytes: a longer line of the input is not a request. missing_line: makes the line of the error file for
        a request without a result; None: such requests get no line.
        """
        published = await asyncio.to_thread(self._publish, batch, target, max_line_bytes, missing_line)
        return await self.get_batch(batch.id) if published else None

    def _publish(
        self, batch: BatchRecord, target: BatchStatus, max_line_bytes: int, missing_line: MissingLine | None
    ) -> bool:
        output = OutputFiles(
            lambda: self._output_file(batch.id, "output"), lambda: self._output_file(batch.id, "error")
        )
        published = False
        try:
            self._write_output(output, batch, max_line_bytes, missing_line)
            written = (
                self._output_record(batch, output.output, "output"),
                self._output_record(batch, output.errors, "error"),
            )
            published = self._database.write_blocking(
                batches.publish, batch.id, batch.status, target, written, self.now()
            )
        finally:
            if not published:
                output.discard()
        return published

    def _write_output(
        self, output: OutputFiles, batch: BatchRecord, max_line_bytes: int, missing_line: MissingLine | None
    ) -> None:
        path = self.input_path(batch)
        # if it was cancelled before its input was checked, or the input is lost, no line can be named
        missing = missing_line if batch.in_progress_at and path.exists() else None
        with self._database.scan() as connection:
            write_results(output, connection, batch.id, path, max_line_bytes, missing)
            output.publish()

    def _output_record(self, batch: BatchRecord, file: PendingFile | None, kind: str) -> FileRecord | None:
        if file is None:
            return None
        now = self.now()
        expires = now + (batch.output_expires_seconds or MAX_EXPIRY_SECONDS)
        return FileRecord(file.id, "batch_output", f"{batch.id}_{kind}.jsonl", file.size, now, expires, batch.owner)

    # housekeeping

    async def sweep(self) -> None:
        """Remove expired and deleted files, published results, old idempotency keys, expired responses and threads."""
        now = self.now()
        await self._database.write(files.hide_expired, now)
        left = await self._remove_bytes()
        while await self._database.write(batches.drop_published_results, SWEEP_ROWS) == SWEEP_ROWS:
            pass
        await self._database.write(files.forget_tombstones, now)
        await self._database.write(batches.forget_replies, now)
        await self.responses.sweep()
        await self.threads.sweep()
        _raise_of(left)

    async def _remove_bytes(self) -> dict[str, StorageError]:
        """Remove the bytes, then record that. A crash between the two is repaired at the next start.

        Returns the files that could not be removed: the next call tries again.
        """
        removable = await self._database.read(files.removable)
        left = await asyncio.to_thread(self._unlink_files, removable) if removable else {}
        if removed := [file_id for file_id in removable if file_id not in left]:
            await self._database.write(files.mark_removed, removed)
        return left

    def _unlink_files(self, file_ids: list[str]) -> dict[str, StorageError]:
        left: dict[str, StorageError] = {}
        for file_id in file_ids:
            try:
                self.disk.unlink(self._files / file_id)
            except OSError as error:
                left[file_id] = storage_error(error)
        return left

    async def close(self) -> None:
        await asyncio.to_thread(self._database.close)
        self._lock.release()


class Upload:
    """A file being written. Bytes go to tmp/, then to files/; it is invisible until `finish` inserts its row."""

    def __init__(self, store: Store, file: PendingFile) -> None:
        self._store = store
        self._file = file

    @property
    def size(self) -> int:
        """Return the number of bytes so far."""
        return self._file.size

    async def write(self, data: bytes) -> None:
        await asyncio.to_thread(self._file.write, data)

    async def finish(self, *, filename: str, purpose: str, expires_seconds: int | None, owner: str = "") -> FileRecord:
        await asyncio.to_thread(self._file.publish)
        now = self._store.now()
        expires_at = None if expires_seconds is None else now + expires_seconds
        record = FileRecord(self._file.id, purpose, filename, self._file.size, now, expires_at, owner)
        await self._store.insert_file(record)
        return record

    async def discard(self) -> None:
        """Drop the upload. May be called at any time except after a successful `finish`."""
        await asyncio.to_thread(self._file.discard, published=True)


def _raise_of(left: dict[str, StorageError]) -> None:
    """Raise the first error of the files that could not be removed."""
    for error in left.values():
        raise error


@contextlib.contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, StorageError, StoreDamagedError) as error:
        fix = "make room on its disk" if is_full(error) else "check --store.path"
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        raise ConfigError(f"the store {directory} cannot be used: {reason}", fix=fix) from error


def _keep_adapter(connection: sqlite3.Connection, name: str, body: bytes) -> None:
    connection.execute("INSERT OR REPLACE INTO adapters VALUES (?, ?)", (name, body))


def _forget_adapter(connection: sqlite3.Connection, name: str) -> bool:
    return connection.execute("DELETE FROM adapters WHERE name = ?", (name,)).rowcount > 0


def _kept_adapters(connection: sqlite3.Connection) -> list[bytes]:
    return [body for (body,) in connection.execute("SELECT body FROM adapters ORDER BY name")]


def _create_batch(
    connection: sqlite3.Connection,
    batch_id: str,
    new: NewBatch,
    idempotency: tuple[str, bytes] | None,
    reply: Callable[[BatchRecord], bytes],
    now: int,
) -> tuple[bytes, BatchRecord | None]:
    if idempotency is not None and (earlier := batches.find_replay(connection, new.owner, *idempotency)) is not None:
        return earlier, None
    try:
        file = files.get_file(connection, new.input_file_id, now, new.owner)
    except NotFoundError as error:
        raise InvalidValueError(error.message, param="input_file_id") from error
    if file.purpose != "batch":
        raise InvalidValueError(f"The file {file.id} has purpose '{file.purpose}', not 'batch'.", param="input_file_id")
    record = batches.insert_batch(connection, batch_id, new, now)
    response = reply(record)
    if idempotency is not None:
        batches.remember_reply(connection, new.owner, *idempotency, response, now)
    return response, record
