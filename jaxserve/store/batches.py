"""SQL of batches and of the results of their requests. States change by compare-and-set updates.

Every function takes the connection first and runs inside one transaction or read. A transition that is not legal from
the current state changes nothing and returns that. Only the transition into a state writes the state's `*_at` column.

owner: the API key that asks, which sees only its own batches; None: see all
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from jaxserve.errors import ConflictError, InvalidValueError, NotFoundError, StoreDamagedError
from jaxserve.store.database import DAMAGED
from jaxserve.store.files import OWNED, insert_file, select_page
from jaxserve.store.records import (
    EDGES,
    BatchError,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineResult,
    ListQuery,
    NewBatch,
    Page,
    TokenCounts,
)

IDEMPOTENCY_SECONDS = 48 * 3600

_COLUMNS = """id, endpoint, input_file_id, completion_window, status, created_at, expires_at, model, output_file_id,
    error_file_id, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at, cancelled_at,
    total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, errors, metadata,
    output_expires_seconds, owner"""
LIVE = "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"


def insert_batch(connection: sqlite3.Connection, batch_id: str, new: NewBatch, now: int) -> BatchRecord:
    """Insert a new batch in state validating and return it."""
    connection.execute(
        """INSERT INTO batches (id, endpoint, input_file_id, completion_window, status, created_at, expires_at,
               metadata, output_expires_seconds, owner) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (
            batch_id,
            new.endpoint,
            new.input_file_id,
            new.completion_window,
            BatchStatus.VALIDATING,
            now,
            now + new.window_seconds,
            None if new.metadata is None else json.dumps(new.metadata),
            new.output_expires_seconds,
            new.owner,
        ),
    )
    return get_batch(connection, batch_id)


def find_replay(connection: sqlite3.Connection, owner: str, key: str, fingerprint: bytes) -> bytes | None:
    """Return the first answer given under an owner's idempotency key.

    Raises InvalidValueError if that answer was to a different request.
    """
    row = connection.execute(
        "SELECT fingerprint, response FROM idempotency WHERE owner = ? AND key = ?", (owner, key)
    ).fetchone()
    if row is None:
        return None
    if row[0] != fingerprint:
        raise InvalidValueError("This Idempotency-Key was used with other parameters.", param="Idempotency-Key")
    return row[1]


def remember_reply(
    connection: sqlite3.Connection, owner: str, key: str, fingerprint: bytes, response: bytes, now: int
) -> None:
    connection.execute("INSERT INTO idempotency VALUES (?, ?, ?, ?, ?)", (owner, key, fingerprint, response, now))


def forget_replies(connection: sqlite3.Connection, now: int) -> None:
    connection.execute("DELETE FROM idempotency WHERE created_at < ?", (now - IDEMPOTENCY_SECONDS,))


def get_batch(connection: sqlite3.Connection, batch_id: str, owner: str | None = None) -> BatchRecord:
    """Return a batch. Raises NotFoundError."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM batches WHERE id = :id AND {OWNED}", {"id": batch_id, "owner": owner}
    ).fetchone()
    if row is None:
        raise NotFoundError(f"No batch found with id '{batch_id}'.", param="batch_id")
    return _record(row)


def list_batches(connection: sqlite3.Connection, query: ListQuery) -> Page[BatchRecord]:
    """Return a page of batches. Raises InvalidValueError if `after` was never the id of a batch."""
    page = select_page(connection, f"SELECT {_COLUMNS} FROM batches WHERE TRUE", query)
    return Page([_record(row) for row in page.items], page.has_more)


def live_batches(connection: sqlite3.Connection) -> list[str]:
    """List the ids of batches that are not in a terminal state, oldest first."""
    return [row[0] for row in connection.execute(f"SELECT id FROM batches WHERE {LIVE} ORDER BY seq")]


def move(connection: sqlite3.Connection, batch_id: str, source: BatchStatus, target: BatchStatus, now: int) -> bool:
    """Change the state of a batch. Return False, with nothing changed, if it is not in `source` any more.

    Raises ValueError if the transition is not legal.
    """
    if target not in EDGES[source]:
        raise ValueError(f"no edge {source} -> {target}")
    changed = connection.execute(
        f"UPDATE batches SET status = ?, {target}_at = ? WHERE id = ? AND status = ?",
        (target, now, batch_id, source),
    )
    return changed.rowcount == 1


def start(connection: sqlite3.Connection, batch_id: str, total: int, model: str | None, now: int) -> bool:
    """Change validating -> in_progress."""
    if not move(connection, batch_id, BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, now):
        return False
    connection.execute("UPDATE batches SET total = ?, model = ? WHERE id = ?", (total, model, batch_id))
    return True


def fail(
    connection: sqlite3.Connection, batch_id: str, source: BatchStatus, errors: Sequence[BatchError], now: int
) -> bool:
    """Change validating, or in_progress if the input is lost, -> failed."""
    if not move(connection, batch_id, source, BatchStatus.FAILED, now):
        return False
    data = json.dumps([asdict(error) for error in errors])
    connection.execute("UPDATE batches SET errors = ? WHERE id = ?", (data, batch_id))
    return True


def cancel(connection: sqlite3.Connection, batch_id: str, now: int, owner: str | None) -> BatchRecord:
    """Change to cancelling. A second cancel changes nothing. Raises ConflictError if it ended in another way."""
    batch = get_batch(connection, batch_id, owner)
    if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        return batch
    if batch.status.terminal:
        raise ConflictError(f"Cannot cancel a batch with status '{batch.status}'.", param="batch_id")
    move(connection, batch_id, batch.status, BatchStatus.CANCELLING, now)
    return get_batch(connection, batch_id)


def add_results(connection: sqlite3.Connection, batch_id: str, results: Iterable[LineResult]) -> None:
    """Save finished requests, once each, and count them. Does nothing unless the batch is running."""
    row = connection.execute(
        """SELECT seq FROM batches WHERE id = ? AND in_progress_at IS NOT NULL
           AND status IN ('in_progress', 'cancelling')""",
        (batch_id,),
    ).fetchone()
    if row is None:
        return
    fresh = [result for result in results if _insert_result(connection, row[0], result)]
    usage = sum((result.usage for result in fresh), TokenCounts())
    completed = sum(result.succeeded for result in fresh)
    connection.execute(
        """UPDATE batches SET completed = completed + ?, failed = failed + ?, input_tokens = input_tokens + ?,
           cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,
           reasoning_tokens = reasoning_tokens + ? WHERE seq = ?""",
        (
            completed,
            len(fresh) - completed,
            usage.input_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            usage.reasoning_tokens,
            row[0],
        ),
    )


def _insert_result(connection: sqlite3.Connection, seq: int, result: LineResult) -> bool:
    inserted = connection.execute(
        "INSERT INTO results VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
        (seq, result.line, result.succeeded, result.payload),
    )
    return inserted.rowcount == 1


def finished_lines(connection: sqlite3.Connection, batch_id: str) -> set[int]:
    rows = connection.execute(
        "SELECT line FROM results WHERE batch = (SELECT seq FROM batches WHERE id = ?)", (batch_id,)
    )
    return {row[0] for row in rows}


def results_after(
    connection: sqlite3.Connection, batch_id: str, line: int, limit: int
) -> list[tuple[int, bool, bytes]]:
    """Return up to `limit` results (line, succeeded, payload) of lines after `line`, in order of lines."""
    rows = connection.execute(
        """SELECT line, succeeded, payload FROM results
           WHERE batch = (SELECT seq FROM batches WHERE id = ?) AND line > ? ORDER BY line LIMIT ?""",
        (batch_id, line, limit),
    )
    return [(row[0], bool(row[1]), row[2]) for row in rows]


def publish(
    connection: sqlite3.Connection,
    batch_id: str,
    source: BatchStatus,
    target: BatchStatus,
    written: tuple[FileRecord | None, FileRecord | None],
    now: int,
) -> bool:
    """Write the final state with its output and error file. Requests that never ran are counted as failed."""
    output, errors = written
    if not move(connection, batch_id, source, target, now):
        return False
    for file in written:
        if file is not None:
            insert_file(connection, file)
    connection.execute(
        "UPDATE batches SET output_file_id = ?, error_file_id = ?, failed = total - completed WHERE id = ?",
        (output and output.id, errors and errors.id, batch_id),
    )
    return True


def drop_published_results(connection: sqlite3.Connection, limit: int) -> int:
    """Delete up to `limit` results that published files contain. Returns how many were deleted."""
    removed = connection.execute(
        f"""DELETE FROM results WHERE rowid IN (SELECT results.rowid FROM results
            JOIN batches ON batches.seq = results.batch WHERE NOT {LIVE} LIMIT ?)""",
        (limit,),
    )
    return removed.rowcount


def _record(row: tuple) -> BatchRecord:
    try:
        return _parsed(row)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(DAMAGED) from error


def _parsed(row: tuple) -> BatchRecord:
    *plain, total, completed, failed, input_t, cached, output_t, reasoning, errors, metadata, expires, owner = row
    plain[4] = BatchStatus(plain[4])
    return BatchRecord(
        *plain,
        total=total,
        completed=completed,
        failed=failed,
        usage=TokenCounts(input_t, cached, output_t, reasoning),
        errors=tuple(BatchError(**error) for error in json.loads(errors)),
        metadata=None if metadata is None else json.loads(metadata),
        output_expires_seconds=expires,
        owner=owner,
    )
