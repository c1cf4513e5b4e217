"""Files and batches of several API keys in one store, and databases from before there were any."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError, InvalidValueError, NotFoundError
from jaxserve.store import FileRecord, NewBatch, Store, files
from jaxserve.store.database import SCHEMA_VERSION
from tests.store.disks import FailingDisk
from tests.store.helpers import DAY, ENDPOINT

FILE = f"file-{'a' * 24}"

# The schema of version 1, as it was.
VERSION_1 = """
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
    stored INTEGER NOT NULL DEFAULT 1  -- 0: the bytes are gone
);
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
    CHECK (completed + failed <= total)
);
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
    key TEXT PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    response BLOB NOT NULL,
    created_at INTEGER NOT NULL
);
"""


async def upload(store: Store, owner: str) -> FileRecord:
    incoming = store.begin_upload()
    await incoming.write(b"{}\n")
    return await incoming.finish(filename="in.jsonl", purpose="batch", expires_seconds=None, owner=owner)


async def create(store: Store, file_id: str, owner: str, key: tuple[str, bytes] | None = None) -> bytes:
    new = NewBatch(ENDPOINT, file_id, "24h", DAY, owner=owner)
    answer, _ = await store.create_batch(new, idempotency=key, reply=lambda record: record.id.encode())
    return answer


def test_what_belongs_to_another_is_not_there(store: Store) -> None:
    async def main() -> None:
        file = await upload(store, "a")
        batch_id = (await create(store, file.id, "a")).decode()
        calls: list[Callable[[str | None], Awaitable[Any]]] = [
            lambda owner: store.get_file(file.id, owner=owner),
            lambda owner: store.open_file(file.id, owner=owner),
            lambda owner: store.get_batch(batch_id, owner=owner),
            lambda owner: store.cancel_batch(batch_id, owner=owner),
            lambda owner: store.delete_file(file.id, owner=owner),
        ]
        for call in calls:
            for other in ("b", ""):
                with pytest.raises(NotFoundError):
                    await call(other)
        assert (await store.get_file(file.id)).owner == "a" == (await store.get_batch(batch_id)).owner
        for call in calls:
            result = await call("a")
            if isinstance(result, tuple):
                result[1].close()
        with pytest.raises(InvalidValueError) as error:
            await create(store, (await upload(store, "b")).id, "a")
        assert error.value.param == "input_file_id"

    asyncio.run(main())


def test_bytes_go_first_on_a_full_disk_but_only_the_owners(store: Store) -> None:
    async def main() -> None:
        file = await upload(store, "a")
        for owner, expected in (("a", True), (None, True), ("b", False), ("", False)):
            assert await store._database.read(files.may_remove, file.id, store.now(), owner) == expected

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["files", "batches"])
def test_pages_of_an_owner(store: Store, kind: str) -> None:
    async def main() -> None:
        made: dict[str, list[str]] = {"a": [], "b": [], "": []}
        listing = store.list_files if kind == "files" else store.list_batches
        for number in range(12):
            owner = ("a", "b", "")[number % 3]
            file = await upload(store, owner)
            made[owner].append(file.id if kind == "files" else (await create(store, file.id, owner)).decode())
        for owner, ids in made.items():
            found, after = [], None
            while True:
                page = await listing(limit=3, after=after, owner=owner)
                found += [item.id for item in page.items]
                if not page.has_more:
                    break
                after = found[-1]
            assert found == ids[::-1]
            with pytest.raises(InvalidValueError):
                await listing(limit=3, after=made["b" if owner != "b" else "a"][0], owner=owner)
        assert len((await listing(limit=100)).items) == 12

    asyncio.run(main())


def test_a_list_of_an_owner_reads_its_own_rows_only(store: Store) -> None:
    connection = store._database.connect_reader()
    for table in ("files", "batches"):
        for more in ("", " AND seq < 5"):
            query = f"SELECT * FROM {table} WHERE owner = 'a'{more} ORDER BY seq DESC LIMIT 3"
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
            assert len(plan) == 1 and f"INDEX {table}_owner" in plan[0], plan
    connection.close()


def test_an_idempotency_key_is_its_owners(store: Store) -> None:
    async def main() -> None:
        answers = {}
        for owner in ("a", "b", ""):
            file = await upload(store, owner)
            answers[owner] = await create(store, file.id, owner, ("key", owner.encode()))
            assert await create(store, file.id, owner, ("key", owner.encode())) == answers[owner]
        assert len(set(answers.values())) == 3

    asyncio.run(main())


def old_database(directory: Path) -> None:
    (directory / "files").mkdir(parents=True)
    (directory / "files" / FILE).write_bytes(b"{}\n")
    connection = sqlite3.connect(directory / "store.db")
    connection.executescript(VERSION_1 + "PRAGMA user_version = 1;")
    connection.execute(
        "INSERT INTO files (id, purpose, filename, bytes, created_at) VALUES (?, 'batch', 'x', 3, 5)", (FILE,)
    )
    connection.execute(
        """INSERT INTO batches (id, endpoint, input_file_id, completion_window, status, created_at, expires_at)
           VALUES ('batch_1', '/v1/completions', ?, '24h', 'completed', 5, 6)""",
        (FILE,),
    )
    connection.execute("INSERT INTO idempotency VALUES ('key', x'01', x'02', 5)")
    connection.commit()
    connection.close()


def shape(path: Path) -> dict[str, Any]:
    """Columns and indexes of each table."""
    connection = sqlite3.connect(path)
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {
        table: (
            connection.execute(f"PRAGMA table_info({table})").fetchall(),
            sorted(row[1:] for row in connection.execute(f"PRAGMA index_list({table})")),
        )
        for table in sorted(tables)
    }
    connection.close()
    return found


def test_a_database_from_before_belongs_to_the_default_key(tmp_path: Path) -> None:
    old_database(tmp_path / "old")
    store = Store(tmp_path / "old")

    async def main() -> None:
        for owner in ("", None):
            (file,) = (await store.list_files(limit=5, owner=owner)).items
            (batch,) = (await store.list_batches(limit=5, owner=owner)).items
            assert (file.id, file.owner, batch.id, batch.owner) == (FILE, "", "batch_1", "")
        assert not (await store.list_files(limit=5, owner="a")).items
        assert await create(store, FILE, "", ("key", b"\x01")) == b"\x02"
        await store.close()

    asyncio.run(main())
    again = Store(tmp_path / "old")
    asyncio.run(again.close())
    asyncio.run(Store(tmp_path / "new").close())
    assert shape(tmp_path / "old" / "store.db") == shape(tmp_path / "new" / "store.db")


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    old_database(tmp_path / "old")
    before = shape(tmp_path / "old" / "store.db")
    disk = FailingDisk()
    disk.failing.add("commit")
    with pytest.raises((ConfigError, OSError)):
        Store(tmp_path / "old", disk=disk)
    assert shape(tmp_path / "old" / "store.db") == before
    asyncio.run(Store(tmp_path / "old").close())
    connection = sqlite3.connect(tmp_path / "old" / "store.db")
    assert connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
    connection.close()
