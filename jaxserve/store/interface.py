"""What the rest of the server asks of a store. `SqliteStore` implements it; nothing outside store/ sees SQL.

Writes are durable when they return, and have changed nothing when they raise StorageError. Lists are in the order of
creation and neither skip nor repeat an object while others are added or deleted.
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
    """A file on its way in. It does not exist for anybody until `finish` returns."""

    @property
    def size(self) -> int:
        """Bytes so far."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def finish(
        self, *, filename: str, purpose: str, expires_seconds: int | None, owner: str = ""
    ) -> FileRecord: ...

    async def discard(self) -> None:
        """Forget it. Safe to call at any time but after a successful `finish`."""
        ...


class Store(Protocol):
    """Files and batches.

    owner: the API key that asks, "" for the default key. What belongs to another is not there; None finds all.

    Raises NotFoundError for ids that are not there, StorageError if the disk refuses, StoreDamagedError if what is
    read makes no sense; from then on nothing is written.
    """

    @property
    def condition(self) -> StoreCondition:
        """Whether it can be written, as of the latest write."""
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
    ) -> Page[FileRecord]: ...

    async def delete_file(self, file_id: str, *, owner: str | None = None) -> None: ...

    async def open_file(self, file_id: str, *, owner: str | None = None) -> tuple[FileRecord, BinaryIO]:
        """The file and its bytes, which stay readable if it is deleted meanwhile. The caller closes."""
        ...

    # batches, as clients see them
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

    # batches, as the one who runs them sees them; a False or None says that the batch has left the expected state
    async def live_batches(self) -> list[str]: ...

    def input_path(self, batch: BatchRecord) -> Path:
        """The input file, which is readable until the batch has ended, deleted by its owner or not."""
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
        """Write the output files and take the last edge, all or nothing."""
        ...

    async def sweep(self) -> None:
        """Remove what has expired, was deleted, or is kept twice."""
        ...

    async def close(self) -> None: ...
