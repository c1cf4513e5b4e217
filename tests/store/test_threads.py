"""Threads of Messages in the store: their order, owners, expiry, quota, claims, a full disk, an earlier version."""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import StorageError, ThreadError, ThreadNotFoundError
from jaxserve.store import Store, ThreadLimits, threads
from jaxserve.store.database import SCHEMA_VERSION
from jaxserve.store.threads import ThreadStore
from tests.store.disks import FailingDisk
from tests.store.helpers import FakeClock
from tests.store.test_response_store import VERSION_2, rows

LIMITS = ThreadLimits(seconds=100, quota=1000)


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    store = Store(tmp_path / "store", clock=clock, thread_limits=LIMITS)
    yield store
    asyncio.run(store.close())


def run(store: Store, work: Callable[[ThreadStore], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work(store.threads))


async def begin(kept: ThreadStore, name: str, size: int = 0, owner: str = "") -> None:
    await kept.begin(name, f"[{name}]".encode() + b" " * size, b"{}", owner=owner)


async def is_there(kept: ThreadStore, name: str, owner: str | None = "") -> bool:
    try:
        await kept.history(name, owner=owner)
    except ThreadNotFoundError as error:
        assert (error.status, error.message) == (404, f"No thread was found for {error.param} '{name}'.")
        return False
    return True


def test_a_thread_has_its_head_and_every_turn_and_each_reply_is_continued_once(store: Store) -> None:
    async def work(kept: ThreadStore) -> None:
        await kept.begin("a", b"[1]", b"{head}", owner="")
        await begin(kept, "other")
        await kept.extend("a", "b", b"[2]")
        await kept.extend("b", "c", b"[3]")
        history = await kept.history("c", owner="")
        assert (history.head, history.turns, history.size) == (b"{head}", (b"[1]", b"[2]", b"[3]"), 15)
        for name in ("a", "b"):
            with pytest.raises(ThreadError, match="already been continued") as caught:
                await kept.history(name, owner="")
            assert caught.value.details == {"error_code": "thread_already_continued"}
        await kept.extend("a", "late", b"[4]")  # a second answer to a reply that has one
        assert (await kept.history("c", owner="")).turns == (b"[1]", b"[2]", b"[3]")
        assert not await is_there(kept, "late") and not await is_there(kept, "unknown")

    run(store, work)


def test_a_thread_is_of_its_key(store: Store) -> None:
    async def work(kept: ThreadStore) -> None:
        await begin(kept, "a", owner="ann")
        await kept.extend("a", "b", b"[]")
        for name in ("a", "b"):  # another key does not learn that it was continued either
            assert not await is_there(kept, name, "bob") and not await is_there(kept, name)
        assert await is_there(kept, "b", "ann") and await is_there(kept, "b", None)

    run(store, work)


def test_a_thread_expires_after_its_last_request(store: Store, clock: FakeClock, tmp_path: Path) -> None:
    async def work(kept: ThreadStore) -> None:
        await begin(kept, "a")
        clock.now += 99
        await kept.extend("a", "b", b"[]")
        clock.now += 99
        assert await is_there(kept, "b")
        clock.now += 1
        assert not await is_there(kept, "b") and not await is_there(kept, "a")
        assert rows(tmp_path / "store", "thread_turns") == 2
        await store.sweep()
        assert rows(tmp_path / "store", "threads") == rows(tmp_path / "store", "thread_turns") == 0

    run(store, work)


def test_many_expired_threads_are_swept(store: Store, clock: FakeClock, tmp_path: Path) -> None:
    async def work(kept: ThreadStore) -> None:
        for number in range(2 * threads.SWEEP_THREADS):
            await begin(kept, str(number))
        clock.now += 100
        await begin(kept, "new")
        await kept.sweep()
        assert rows(tmp_path / "store", "threads") == 1 and await is_there(kept, "new")

    run(store, work)


def test_a_key_keeps_what_it_used_last(store: Store, clock: FakeClock, tmp_path: Path) -> None:
    async def work(kept: ThreadStore) -> None:
        for name in ("a", "b", "c"):
            await begin(kept, name, 300)
            clock.now += 1
        await begin(kept, "other", 900, owner="ann")
        await kept.extend("a", "a2", b"[]")
        clock.now += 1
        await begin(kept, "d", 300)
        assert [await is_there(kept, name) for name in ("a2", "b", "c", "d")] == [True, False, True, True]
        assert await is_there(kept, "other", "ann")
        clock.now += 1
        await kept.extend("d", "d2", b" " * 600)  # it alone nearly fills the quota
        assert [await is_there(kept, name) for name in ("a2", "c", "d2")] == [False, False, True]
        assert rows(tmp_path / "store", "thread_turns") == 3

    run(store, work)


def test_a_thread_that_is_too_large_is_dropped_alone(store: Store) -> None:
    async def work(kept: ThreadStore) -> None:
        await begin(kept, "small", 100)
        await begin(kept, "large", 1001)
        await begin(kept, "grown", 800)
        await kept.extend("grown", "grown2", b" " * 300)
        assert [await is_there(kept, name) for name in ("small", "large", "grown", "grown2")] == [True, *[False] * 3]

    run(store, work)


def test_a_reply_is_continued_by_one_request_at_a_time(store: Store) -> None:
    release = store.threads.claim("a")
    with pytest.raises(ThreadError, match="still continuing") as caught:
        store.threads.claim("a")
    assert (caught.value.status, caught.value.details) == (400, {"error_code": "thread_continue_in_flight"})
    store.threads.claim("b")()
    release()
    store.threads.claim("a")()


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    disk = FailingDisk()
    store = Store(tmp_path / "store", disk=disk)

    async def work(kept: ThreadStore) -> None:
        await begin(kept, "a")
        disk.failing.add("commit")
        for call in (kept.extend("a", "b", b"[]"), begin(kept, "c")):
            with pytest.raises(StorageError):
                await call
        disk.failing.clear()
        assert [await is_there(kept, name) for name in ("a", "b", "c")] == [True, False, False]
        await store.close()

    run(store, work)


RESPONSES_OF_VERSION_3 = """
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    ended_at INTEGER,
    background INTEGER NOT NULL,
    logged INTEGER NOT NULL,        -- its events are in response_events
    seen INTEGER NOT NULL DEFAULT 0,  -- a client may have read its events
    previous_id TEXT,
    conversation_id TEXT,
    turns INTEGER NOT NULL,         -- responses in the chain that ends here
    bytes INTEGER NOT NULL,         -- of the items of that chain
    request BLOB,                   -- the body of a background response, until it has ended
    body BLOB NOT NULL              -- the Response object without its output
);
CREATE INDEX responses_previous ON responses (previous_id) WHERE previous_id IS NOT NULL;
CREATE INDEX responses_expiry ON responses (expires_at);
CREATE INDEX responses_live ON responses (status) WHERE status IN ('queued', 'in_progress');
CREATE INDEX responses_logged ON responses (ended_at) WHERE logged;
CREATE TABLE items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order of the conversation
    holder TEXT NOT NULL,           -- id of the response or conversation
    side TEXT NOT NULL,             -- input or output of a response; item of a conversation
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX items_holder ON items (holder, side);
CREATE INDEX items_id ON items (id);
CREATE TABLE response_events (
    response_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (response_id, number)
);
CREATE TABLE conversations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    metadata TEXT NOT NULL,
    bytes INTEGER NOT NULL          -- of its items
);
"""


def test_a_store_of_version_3_is_migrated(tmp_path: Path) -> None:
    asyncio.run(Store(tmp_path / "store").close())
    (tmp_path / "store" / "store.db").unlink()
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / "store.db")) as connection:
        connection.executescript(VERSION_2 + RESPONSES_OF_VERSION_3 + "PRAGMA user_version = 3;")
        connection.execute("INSERT INTO conversations VALUES (1, 'conv_a', '', 5, '{}', 0)")
        connection.commit()
    store = Store(tmp_path / "store")

    async def work(kept: ThreadStore) -> None:
        assert (await store.responses.get_conversation("conv_a", owner="")).created_at == 5
        await begin(kept, "a")
        await kept.extend("a", "b", b"[]")
        assert await is_there(kept, "b")
        await store.close()

    run(store, work)
    asyncio.run(Store(tmp_path / "fresh").close())
    shapes = []
    for name in ("store", "fresh"):
        with contextlib.closing(sqlite3.connect(tmp_path / name / "store.db")) as connection:
            assert connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
            shapes.append(set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")))
    assert shapes[0] == shapes[1]
