"""Responses and conversations in the store: chains, owners, expiry, the background queue, restarts, full disks."""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from jaxserve.errors import HTTPError, InvalidValueError, NotFoundError, QueueFullError, StorageError
from jaxserve.store import Store, records, responses
from jaxserve.store import responses as response_store
from jaxserve.store.database import SCHEMA_VERSION
from jaxserve.store.records import History, ListQuery, NewResponse, ResponseStatus, StoredItem
from jaxserve.store.responses import ResponseStore
from tests.store.disks import FailingDisk
from tests.store.helpers import DAY, FakeClock

Work = Callable[[ResponseStore], Coroutine[Any, Any, None]]


def item(name: str, size: int = 0) -> StoredItem:
    body = {"type": "message", "role": "user", "content": "x" * size, "id": name}
    return StoredItem(name, orjson.dumps(body))


def new(
    name: str, *, previous: str | None = None, history: History | None = None, status: str = "completed", **keys: Any
) -> NewResponse:
    body = orjson.dumps({"id": name, "object": "response", "status": status})
    items = keys.pop("input", (item(f"in_{name}"),))
    history = history or History()
    return NewResponse(name, ResponseStatus(status), body, items, previous_id=previous, history=history, **keys)


async def add(store: ResponseStore, name: str, previous: str | None = None, **keys: Any) -> None:
    """A response that ended, with one item of output."""
    owner = keys.get("owner", "")
    history = await store.chain(previous, owner=owner) if previous else None
    await store.insert(new(name, previous=previous, history=history, **keys), (item(f"out_{name}"),))


async def queue(store: ResponseStore, name: str, **keys: Any) -> None:
    keys = {"request": b"{}", "logged": True} | keys
    await store.insert(new(name, status="queued", **keys), (), [(0, b"created"), (1, b"queued")])


def names(history: History) -> list[str]:
    return [each.id for each in history.items]


async def status(store: ResponseStore, name: str) -> str:
    record, _ = await store.get(name, owner=None)
    return record.status


def run(store: Store, work: Work) -> None:
    asyncio.run(work(store.responses))


@contextlib.contextmanager
def refused(kind: type[HTTPError], text: str, param: str | None = None, code: str | None = None) -> Iterator[None]:
    with pytest.raises(kind, match=text) as caught:
        yield
    assert param in (None, caught.value.param) and code in (None, caught.value.code)


def rows(store: Path, table: str) -> int:
    with contextlib.closing(sqlite3.connect(store / "store.db")) as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_a_chain_has_all_inputs_and_outputs(store: Store) -> None:
    async def work(kept: ResponseStore) -> None:
        await add(kept, "a")
        await add(kept, "b", "a")
        await add(kept, "c", "b")
        await add(kept, "other", "a")
        history = await kept.chain("c", owner="")
        assert names(history) == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
        assert (history.turns, history.bytes) == (3, sum(each.size for each in history.items))
        assert names(await kept.chain("other", owner="")) == ["in_a", "out_a", "in_other", "out_other"]

    run(store, work)


def test_a_deleted_response_ends_its_chains(store: Store) -> None:
    async def work(kept: ResponseStore) -> None:
        for name, previous in (("a", None), ("b", "a"), ("c", "b")):
            await add(kept, name, previous)
        await kept.delete("a", owner="")
        for asked in ("a", "c"):
            with refused(InvalidValueError, "'a' not found", "previous_response_id", "previous_response_not_found"):
                await kept.chain(asked, owner="")
        with refused(NotFoundError, "^Response with id 'a' not found.$"):
            await kept.get("a", owner="")
        assert await kept.find_items(["in_a", "out_a", "in_b"], owner="") == {"in_b": item("in_b").body}

    run(store, work)


def test_a_chain_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_TURNS", 3)

    async def work(kept: ResponseStore) -> None:
        for name, previous in (("a", None), ("b", "a"), ("c", "b")):
            await add(kept, name, previous)
        with refused(InvalidValueError, "is 3 long", "previous_response_id"):
            await kept.chain("c", owner="")
        large = item("large", records.MAX_HISTORY_BYTES)
        await add(kept, "d", input=(large,))
        with refused(InvalidValueError, "at most 33554432", "previous_response_id"):
            await kept.chain("d", owner="")

    run(store, work)


def test_other_owners_ids_are_unknown(store: Store) -> None:
    async def work(kept: ResponseStore) -> None:
        await add(kept, "a", owner="alice")
        made = await kept.create_conversation({}, [item("i")], owner="alice")
        for asked in ("a", "none"):
            for call in (
                kept.get(asked, owner="bob"),
                kept.delete(asked, owner="bob"),
                kept.cancel(asked, owner="bob"),
                kept.input_items(asked, ListQuery(5, owner="bob")),
            ):
                with refused(NotFoundError, f"^Response with id '{asked}' not found.$"):
                    await call
            with refused(InvalidValueError, f"^Previous response with id '{asked}' not found.$"):
                await kept.chain(asked, owner="bob")
        for asked in (made.id, "none"):
            for call in (
                kept.get_conversation(asked, owner="bob"),
                kept.set_metadata(asked, {}, owner="bob"),
                kept.delete_conversation(asked, owner="bob"),
                kept.add_items(asked, [item("j")], owner="bob"),
                kept.list_items(asked, ListQuery(5, owner="bob")),
                kept.get_item(asked, "i", owner="bob"),
                kept.delete_item(asked, "i", owner="bob"),
                kept.conversation_history(asked, owner="bob"),
            ):
                with refused(NotFoundError, f"^Conversation with id '{asked}' not found.$"):
                    await call
        assert await kept.find_items(["in_a", "i"], owner="bob") == {}
        assert set(await kept.find_items(["in_a", "i"], owner=None)) == {"in_a", "i"}
        assert (await kept.get("a", owner=None))[0].owner == "alice"
        assert names(await kept.conversation_history(made.id, owner="alice")) == ["i"]

    run(store, work)


def test_expired_responses_go_when_no_chain_needs_them(store: Store, clock: FakeClock, tmp_path: Path) -> None:
    async def work(kept: ResponseStore) -> None:
        await add(kept, "a")
        clock.now += 20 * DAY
        await add(kept, "b", "a")
        clock.now += 11 * DAY
        await kept.sweep()
        with refused(NotFoundError, "'a' not found"):
            await kept.get("a", owner="")
        assert names(await kept.chain("b", owner="")) == ["in_a", "out_a", "in_b", "out_b"]
        clock.now += 20 * DAY
        with refused(InvalidValueError, "not found", code="previous_response_not_found"):
            await kept.chain("b", owner="")
        await kept.sweep()

    run(store, work)
    assert [rows(tmp_path / "store", table) for table in ("responses", "items")] == [0, 0]


def test_many_expired_responses_go_in_small_transactions(
    store: Store, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "SWEEP_RESPONSES", 5)

    async def work(kept: ResponseStore) -> None:
        for number in range(23):
            await add(kept, f"r{number}", f"r{number - 1}" if number % 8 else None)
        clock.now += 31 * DAY
        await kept.sweep()

    run(store, work)
    assert rows(tmp_path / "store", "responses") == 0


def test_input_items_by_pages(store: Store) -> None:
    async def work(kept: ResponseStore) -> None:
        await add(kept, "a", input=tuple(item(f"i{number}") for number in range(5)))
        for ascending, order in ((True, [0, 1, 2, 3, 4]), (False, [4, 3, 2, 1, 0])):
            found, after = [], None
            while True:
                page = await kept.input_items("a", ListQuery(2, after, ascending, ""))
                found += [each.id for each in page.items]
                after = found[-1]
                if not page.has_more:
                    break
            assert found == [f"i{number}" for number in order]
        for after in ("none", "out_a"):
            with refused(InvalidValueError, "to page from", "after"):
                await kept.input_items("a", ListQuery(2, after, owner=""))

    run(store, work)


def test_conversations(store: Store) -> None:
    async def work(kept: ResponseStore) -> None:
        made = await kept.create_conversation({"a": "b"}, [item("i0")], owner="")
        await kept.add_items(made.id, [item("i1"), item("i2")], owner="")
        with refused(InvalidValueError, "already has", "items"):
            await kept.add_items(made.id, [item("i3"), item("i1")], owner="")
        assert names(await kept.conversation_history(made.id, owner="")) == ["i0", "i1", "i2"]
        assert (await kept.get_conversation(made.id, owner="")).bytes == 3 * item("i0").size
        assert (await kept.delete_item(made.id, "i1", owner="")).bytes == 2 * item("i0").size
        with refused(NotFoundError, "Item with id 'i1' not found"):
            await kept.get_item(made.id, "i1", owner="")
        assert (await kept.set_metadata(made.id, {"c": "d"}, owner="")).metadata == {"c": "d"}
        with refused(InvalidValueError, "at most", "items"):
            await kept.add_items(made.id, [item("big", records.MAX_HISTORY_BYTES)], owner="")
        await kept.delete_conversation(made.id, owner="")
        with refused(NotFoundError, "not found"):
            await kept.get_conversation(made.id, owner="")

    run(store, work)


def test_what_a_request_refers_to_is_bounded(store: Store) -> None:
    half = item("half", records.MAX_HISTORY_BYTES // 2 + 1)

    async def work(kept: ResponseStore) -> None:
        await add(kept, "a", input=(half, item("i0")))
        assert set(await kept.find_items(["half", "i0", "none", "i0"], owner="")) == {"half", "i0"}
        with refused(InvalidValueError, "at most", "input"):  # an item counts as often as it is named
            await kept.find_items(["half", "half"], owner="")
        made = await kept.create_conversation({}, [half], owner="")
        await add(kept, "b", conversation_id=made.id, input=(StoredItem("other", half.body),))
        with refused(InvalidValueError, "at most", "conversation"):
            await kept.conversation_history(made.id, owner="")

    run(store, work)


@pytest.mark.parametrize(("ended", "joins"), [("completed", True), ("incomplete", True), ("failed", False)])
def test_a_response_joins_its_conversation_when_it_ends(store: Store, ended: str, joins: bool) -> None:
    async def work(kept: ResponseStore) -> None:
        made = await kept.create_conversation({}, [item("first")], owner="")
        await add(kept, "a", status=ended, conversation_id=made.id)
        found = names(await kept.conversation_history(made.id, owner=""))
        assert found == (["first", "in_a", "out_a"] if joins else ["first"])
        with refused(InvalidValueError, "belongs to conversation", "previous_response_id"):
            await kept.chain("a", owner="")
        await kept.delete_conversation(made.id, owner="")
        await add(kept, "b", conversation_id=made.id)  # the conversation is gone: the response is kept all the same
        assert await status(kept, "b") == "completed"

    run(store, work)


def test_the_queue(store: Store) -> None:
    async def work(kept: ResponseStore) -> None:
        for name in "abc":
            await queue(kept, name)
        with refused(InvalidValueError, "has not ended: its status is 'queued'", "previous_response_id"):
            await kept.chain("a", owner="")
        assert [each.id for each in await kept.queued(9)] == ["a", "b", "c"]
        started = await kept.start("a")
        assert started is not None and started[1:] == (b"{}", [item("in_a")])
        assert await kept.start("a") is None
        assert await status(kept, "a") == "in_progress"
        assert await kept.end("a", ResponseStatus.COMPLETED, b"{}", (item("out_a"),))
        assert names(await kept.chain("a", owner="")) == ["in_a", "out_a"]
        assert (await kept.cancel("a", owner=""))[0].status == "completed"
        assert not await kept.end("a", ResponseStatus.FAILED, b"{}", ())

    run(store, work)


def test_a_cancelled_response_never_completes(store: Store) -> None:
    async def work(kept: ResponseStore) -> None:
        await queue(kept, "a")
        await kept.start("a")
        for _ in range(2):
            record, output = await kept.cancel("a", owner="")
            assert (record.status, orjson.loads(record.body)["status"], output) == ("cancelled", "cancelled", [])
        assert not await kept.end("a", ResponseStatus.COMPLETED, b"{}", (item("out_a"),))
        await kept.add_events("a", [(2, b"late")])
        assert await kept.events_after("a", -1, 9) == [(0, b"created"), (1, b"queued")]
        assert await status(kept, "a") == "cancelled"
        await add(kept, "b")
        with refused(InvalidValueError, "^Cannot cancel a synchronous response.$"):
            await kept.cancel("b", owner="")

    run(store, work)


def test_too_many_queued(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_QUEUED", 2)

    async def work(kept: ResponseStore) -> None:
        await queue(kept, "a")
        await queue(kept, "b")
        with refused(QueueFullError, "2 background responses"):
            await queue(kept, "c")
        await add(kept, "d")
        await kept.cancel("a", owner="")
        await queue(kept, "c")

    run(store, work)


def test_a_restart_decides_about_what_ran(store: Store) -> None:
    async def work(kept: ResponseStore) -> None:
        for name in ("seen", "unseen", "waiting", "done"):
            await queue(kept, name)
        for name in ("seen", "unseen", "done"):
            await kept.start(name)
            await kept.add_events(name, [(2, b"x"), (3, b"y")])
        await kept.mark_seen("seen")
        await kept.end("done", ResponseStatus.COMPLETED, b"{}", ())
        await kept.recover(2)
        record, _ = await kept.get("seen", owner="")
        assert record.status == "failed"
        assert orjson.loads(record.body)["error"]["code"] == "server_error"
        assert [each.id for each in await kept.queued(9)] == ["unseen", "waiting"]
        assert [number for number, _ in await kept.events_after("unseen", -1, 9)] == [0, 1]
        assert [number for number, _ in await kept.events_after("seen", 1, 9)] == [2, 3]
        assert await status(kept, "done") == "completed"

    run(store, work)


def test_events_are_dropped_an_hour_after_the_end(store: Store, clock: FakeClock, tmp_path: Path) -> None:
    async def work(kept: ResponseStore) -> None:
        await queue(kept, "a")
        await queue(kept, "b")
        await kept.start("a")
        await kept.end("a", ResponseStatus.COMPLETED, b"{}", ())
        clock.now += 3599
        await kept.sweep()
        assert len(await kept.events_after("a", -1, 9)) == 2
        clock.now += 1
        await kept.sweep()
        assert await kept.events_after("a", -1, 9) == []
        record, _ = await kept.get("a", owner="")
        assert not record.logged
        assert len(await kept.events_after("b", -1, 9)) == 2

    run(store, work)


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    disk = FailingDisk()
    store = Store(tmp_path / "store", disk=disk)

    async def work(kept: ResponseStore) -> None:
        await queue(kept, "q")
        await kept.start("q")
        disk.failing.add("commit")
        for call in (
            kept.insert(new("a"), (item("out"),)),
            kept.end("q", ResponseStatus.COMPLETED, b"{}", (item("out_q"),)),
            kept.create_conversation({}, [item("i")], owner=""),
        ):
            with pytest.raises(StorageError):
                await call
        disk.failing.clear()
        assert await kept.find_items(["in_a", "out", "out_q", "i"], owner=None) == {}
        assert await status(kept, "q") == "in_progress"
        await store.close()

    run(store, work)


VERSION_2 = """
CREATE TABLE lease (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    epoch INTEGER NOT NULL,
    owner TEXT NOT NULL
);
INSERT INTO lease VALUES (1, 0, '');
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    deleted_at INTEGER,             -- hidden from clients; the row stays for a while as a cursor of lists
    stored INTEGER NOT NULL DEFAULT 1,  -- 0: the bytes are gone
    owner TEXT NOT NULL DEFAULT ''  -- the name of an API key; '': the default key
);
CREATE INDEX files_owner ON files (owner);
CREATE INDEX files_expiry ON files (expires_at) WHERE deleted_at IS NULL AND expires_at IS NOT NULL;
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    model TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    errors TEXT NOT NULL DEFAULT '[]',
    metadata TEXT,
    output_expires_seconds INTEGER,
    owner TEXT NOT NULL DEFAULT '',
    CHECK (completed + failed <= total)
);
CREATE INDEX batches_owner ON batches (owner);
CREATE INDEX batches_live ON batches (status) WHERE status IN
    ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE TABLE results (
    batch INTEGER NOT NULL REFERENCES batches (seq),
    line INTEGER NOT NULL,
    succeeded INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (batch, line)
);
CREATE TABLE idempotency (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    response BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (owner, key)
);
"""


def test_a_store_of_version_2_is_migrated(tmp_path: Path) -> None:
    asyncio.run(Store(tmp_path / "store").close())
    (tmp_path / "store" / "store.db").unlink()
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / "store.db")) as connection:
        connection.executescript(VERSION_2 + "PRAGMA user_version = 2;")
        connection.execute(
            "INSERT INTO files (id, purpose, filename, bytes, created_at, stored) VALUES ('f', 'batch', 'x', 3, 5, 0)"
        )
        connection.commit()
    store = Store(tmp_path / "store")

    async def work(kept: ResponseStore) -> None:
        assert [file.id for file in (await store.list_files(limit=5)).items] == ["f"]
        await add(kept, "a")
        assert names(await kept.chain("a", owner="")) == ["in_a", "out_a"]
        await store.close()

    run(store, work)
    asyncio.run(Store(tmp_path / "fresh").close())
    shapes = []
    for name in ("store", "fresh"):
        with contextlib.closing(sqlite3.connect(tmp_path / name / "store.db")) as connection:
            assert connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
            shapes.append(set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")))
    assert shapes[0] == shapes[1]
