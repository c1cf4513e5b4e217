"""The interface of a store. `SqliteStore` implements it; no code outside store/ uses SQL.

A write is durable when it returns, and has changed nothing if it raises StorageError. Lists are in order of creation
and neither skip nor repeat an object while others are added or deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from jaxserve.store.condition import StoreCondition
from jaxserve.store.output import MissingLine
from jaxserve.store.records import (
    BatchError,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineResult,
    NewBatch,
    Page,
)


class Upload(Protocol):
    """A file being written. It is invisible until `finish` returns."""

    @property
    def size(self) -> int:
        """Bytes so far."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def finish(
        self, *, filename: str, purpose: str, expires_seconds: int | None, owner: str = ""
    ) -> FileRecord: ...

    async def discard(self) -> None:
        """Drop the upload. May be called at any time except after a successful `finish`."""
        ...


class Store(Protocol):
    """Files and batches.

    owner: the API key that asks, "" for the default key. It sees only its own objects; None sees all.

    Raises NotFoundError for unknown ids, StorageError if the disk refuses, StoreDamagedError if stored data is damaged;
    after that nothing is written.
    """

    @property
    def condition(self) -> StoreCondition:
        """Return whether the store can be written, as of the latest write."""
        ...

    # files
    def begin_upload(self) -> Upload: ...

    async def get_file(self, file_id: str, *, owner: str | None = None) -> FileRecord: ...

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
        ...

    async def delete_file(self, file_id: str, *, owner: str | None = None) -> None: ...

    async def open_file(self, file_id: str, *, owner: str | None = None) -> tuple[FileRecord, BinaryIO]:
        """Return the file and its bytes, which stay readable if it is deleted meanwhile. The caller closes them."""
        ...

    # batches, as the HTTP routes use them
    async def create_batch(
        self, new: NewBatch, *, idempotency: tuple[str, bytes] | None, reply: Callable[[BatchRecord], bytes]
    ) -> tuple[bytes, BatchRecord | None]:
        """Create a batch of `new.owner` and keep `reply(record)` as the answer to its calls with one idempotency key.

        idempotency: the client's key and a digest of its request
        Returns the answer, and the record unless the answer is an earlier call's.
        """
        ...

    async def get_batch(self, batch_id: str, *, owner: str | None = None) -> BatchRecord: ...

    async def list_batches(
        self, *, limit: int, after: str | None = None, owner: str | None = None
    ) -> Page[BatchRecord]: ...

    async def cancel_batch(self, batch_id: str, *, owner: str | None = None) -> BatchRecord: ...

    # batches, as the batch runner uses them; False or None means that the batch has left the expected state
    async def live_batches(self) -> list[str]: ...

    def input_path(self, batch: BatchRecord) -> Path:
        """Return the path of the input file, readable until the batch has ended even if its owner deleted it."""
        ...

    async def start_batch(self, batch_id: str, total: int, model: str | None) -> bool: ...

    async def fail_batch(self, batch_id: str, source: BatchStatus, errors: Sequence[BatchError]) -> bool: ...

    async def move_batch(self, batch_id: str, source: BatchStatus, target: BatchStatus) -> bool: ...

    async def add_results(self, batch_id: str, results: Sequence[LineResult]) -> None: ...

    async def finished_lines(self, batch_id: str) -> set[int]: ...

    async def publish_batch(
        self,
        batch: BatchRecord,
        target: BatchStatus,
        *,
        max_line_bytes: int,
        missing_line: MissingLine | None,
    ) -> BatchRecord | None:
        """Write the output files and the final state, all or nothing."""
        ...

    async def sweep(self) -> None:
        """Remove objects that have expired or were deleted, and data that is stored twice."""
        ...

    async def close(self) -> None: ...
