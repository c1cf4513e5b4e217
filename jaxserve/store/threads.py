"""Threads of Anthropic's Messages: conversations that clients continue by the id of the latest reply.

The SQL functions take the connection first and run inside a transaction or a read. A thread is a cache of a
conversation that its client has too: if it expires, is dropped for the quota or was never stored, the client gets
ThreadNotFoundError and sends the whole conversation again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.errors import ThreadError, ThreadNotFoundError
from jaxserve.store.database import Database
from jaxserve.store.files import OWNED
from jaxserve.store.records import MAX_HISTORY_BYTES

SWEEP_THREADS = 50  # threads removed in one transaction, so that no write waits long
_PARAM = "thread.previous_message_id"


@dataclass(frozen=True, slots=True)
class ThreadLimits:
    """Limits on stored threads. seconds: time after a thread's last request. quota: bytes of all threads of a key"""

    seconds: int = 3600
    quota: int = 256 * 2**20


@dataclass(frozen=True, slots=True)
class ThreadHistory:
    """The conversation before a request that continues a thread.

    head: JSON of the fields that the request leaves out. turns: JSON lists of messages, oldest first
    """

    head: bytes
    turns: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return len(self.head) + sum(map(len, self.turns))


class ThreadStore:
    """The threads of one store.

    A write is durable when it returns, and has changed nothing if it raises StorageError.

    owner: the API key that asks, "" for the default key, which sees only its own threads; None: see all
    now: returns Unix seconds

    Raises StorageError if the disk refuses, StoreDamagedError if stored data is damaged.
    """

    def __init__(self, database: Database, now: Callable[[], int], limits: ThreadLimits) -> None:
        self._database = database
        self._now = now
        self.limits = limits
        self._claimed: set[str] = set()  # one process owns a store, so its memory suffices

    async def history(self, reply_id: str, *, owner: str | None) -> ThreadHistory:
        """Return a thread up to its latest reply `reply_id`.

        Raises ThreadNotFoundError, and ThreadError if the reply has been continued.
        """
        return await self._database.read(thread_history, reply_id, self._now(), owner)

    def claim(self, reply_id: str) -> Callable[[], None]:
        """Claim a reply for a request that continues it. Return the function that ends the claim.

        Raises ThreadError if another request has claimed it.
        """
        if reply_id in self._claimed:
            message = f"Another request is still continuing from thread.previous_message_id '{reply_id}'."
            raise ThreadError(message, param=_PARAM, code="thread_continue_in_flight")
        self._claimed.add(reply_id)
        return lambda: self._claimed.discard(reply_id)

    async def begin(self, reply_id: str, turn: bytes, head: bytes, *, owner: str) -> None:
        """Store a new thread with its first turn."""
        await self._database.write(insert_thread, (reply_id, turn), head, owner, self.limits, self._now())

    async def extend(self, previous_id: str, reply_id: str, turn: bytes) -> None:
        """Store a turn that continues the reply `previous_id`, unless the thread is gone or was continued meanwhile."""
        await self._database.write(extend_thread, previous_id, (reply_id, turn), self.limits, self._now())

    async def sweep(self) -> None:
        """Remove expired threads."""
        while await self._database.write(drop_expired, SWEEP_THREADS, self._now()) == SWEEP_THREADS:
            pass


def thread_history(connection: sqlite3.Connection, reply_id: str, now: int, owner: str | None) -> ThreadHistory:
    """Return a thread. Raises ThreadNotFoundError, and ThreadError if the reply is not the thread's latest."""
    row = connection.execute(
        f"""SELECT threads.seq, last_id, head FROM thread_turns JOIN threads ON threads.seq = thread
            WHERE id = :id AND expires_at > :now AND {OWNED}""",
        {"id": reply_id, "now": now, "owner": owner},
    ).fetchone()
    if row is None:
        message = f"No thread was found for thread.previous_message_id '{reply_id}'."
        raise ThreadNotFoundError(message, param=_PARAM)
    seq, last_id, head = row
    if last_id != reply_id:
        message = f"thread.previous_message_id: '{reply_id}' has already been continued. Continue the latest reply."
        raise ThreadError(message, param=_PARAM, code="thread_already_continued")
    turns = connection.execute("SELECT body FROM thread_turns WHERE thread = ? ORDER BY seq", (seq,))
    return ThreadHistory(head, tuple(body for (body,) in turns))


def insert_thread(
    connection: sqlite3.Connection, turn: tuple[str, bytes], head: bytes, owner: str, limits: ThreadLimits, now: int
) -> None:
    """Insert a thread with its first turn (id of the reply, JSON)."""
    reply_id, body = turn
    size = len(head) + len(body)
    seq = connection.execute(
        "INSERT INTO threads (last_id, owner, expires_at, bytes, head) VALUES (?, ?, ?, ?, ?) RETURNING seq",
        (reply_id, owner, now + limits.seconds, size, head),
    ).fetchone()[0]
    connection.execute("INSERT INTO thread_turns (id, thread, body) VALUES (?, ?, ?)", (reply_id, seq, body))
    _keep_quota(connection, seq, size, owner, limits.quota)


def extend_thread(
    connection: sqlite3.Connection, previous_id: str, turn: tuple[str, bytes], limits: ThreadLimits, now: int
) -> None:
    """Append a turn (id of the reply, JSON) to the thread whose latest reply is `previous_id`, if it exists."""
    reply_id, body = turn
    row = connection.execute(
        """UPDATE threads SET last_id = ?, expires_at = ?, bytes = bytes + ? WHERE last_id = ?
           RETURNING seq, bytes, owner""",
        (reply_id, now + limits.seconds, len(body), previous_id),
    ).fetchone()
    if row is None:
        return
    seq, size, owner = row
    connection.execute("INSERT INTO thread_turns (id, thread, body) VALUES (?, ?, ?)", (reply_id, seq, body))
    _keep_quota(connection, seq, size, owner, limits.quota)


def _keep_quota(connection: sqlite3.Connection, seq: int, size: int, owner: str, quota: int) -> None:
    """Drop the thread `seq` of `size` bytes if it is too large for the quota.

    Then drop the owner's threads that were used longest ago until the others fit.
    """
    if size > min(MAX_HISTORY_BYTES, quota):
        connection.execute("DELETE FROM threads WHERE seq = ?", (seq,))
    used = connection.execute("SELECT total(bytes) FROM threads WHERE owner = ?", (owner,)).fetchone()[0]
    while used > quota:
        used -= connection.execute(
            """DELETE FROM threads WHERE seq =
               (SELECT seq FROM threads WHERE owner = ? ORDER BY expires_at, seq LIMIT 1) RETURNING bytes""",
            (owner,),
        ).fetchone()[0]


def drop_expired(connection: sqlite3.Connection, limit: int, now: int) -> int:
    """Delete up to `limit` expired threads. Returns how many were deleted."""
    removed = connection.execute(
        "DELETE FROM threads WHERE seq IN (SELECT seq FROM threads WHERE expires_at <= ? LIMIT ?)", (now, limit)
    )
    return removed.rowcount
