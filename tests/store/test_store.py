"""What survives: recovery, the lease, the lock, and a disk that is full, read-only or broken."""

import asyncio
import contextlib
import errno
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError, StorageError
from jaxserve.store import BatchStatus, LineResult, Store
from jaxserve.store.database import SCHEMA_VERSION, LeaseLostError
from jaxserve.store.directory import Disk, remove
from tests.store.disks import FailingDisk
from tests.store.helpers import content, new_batch, upload
from tests.store.test_response_store import VERSION_2

FULL = "The server's disk is full."


def reopen(store: Store, tmp_path: Path) -> Store:
    asyncio.run(store.close())
    return Store(tmp_path / "store")


def integrity(tmp_path: Path) -> str:
    connection = sqlite3.connect(tmp_path / "store" / "store.db")
    try:
        return connection.execute("PRAGMA integrity_check").fetchone()[0]
    finally:
        connection.close()


@pytest.fixture
def disk() -> FailingDisk:
    return FailingDisk()


@pytest.fixture
def failing(tmp_path: Path, disk: FailingDisk) -> Iterator[Store]:
    store = Store(tmp_path / "store", disk=disk)
    yield store
    disk.failing.clear()
    asyncio.run(store.close())
    assert integrity(tmp_path) == "ok"


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    batch = asyncio.run(new_batch(store, b"abc"))
    store = reopen(store, tmp_path)
    assert asyncio.run(store.get_batch(batch.id)) == batch
    assert asyncio.run(store.live_batches()) == [batch.id]
    assert asyncio.run(content(store, batch.input_file_id)) == b"abc"
    asyncio.run(store.close())


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    kept, lost = asyncio.run(upload(store)), asyncio.run(upload(store))
    (tmp_path / "store" / "files" / f"file-{'0' * 24}").write_bytes(b"x")
    (tmp_path / "store" / "tmp" / ("0" * 24)).write_bytes(b"x")
    (tmp_path / "store" / "files" / lost.id).unlink()
    store = reopen(store, tmp_path)
    assert [path.name for path in (tmp_path / "store" / "files").iterdir()] == [kept.id]
    assert list((tmp_path / "store" / "tmp").iterdir()) == []
    assert asyncio.run(store.list_files(limit=9)).items == [kept]
    asyncio.run(store.close())


def test_a_second_server_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from jaxserve.store import Store;"
        "Store(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    )
    first = subprocess.Popen([sys.executable, "-c", code, tmp_path / "store"], stdout=subprocess.PIPE)
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match=f"pid {first.pid}") as error:
            Store(tmp_path / "store")
        assert error.value.fix
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    asyncio.run(Store(tmp_path / "store").close())


def test_a_server_whose_lease_was_taken_cannot_write(tmp_path: Path) -> None:
    """The lock file is lost (a clean-up script): the epoch in the database still keeps the old server out."""
    old = Store(tmp_path / "store")
    batch = asyncio.run(new_batch(old, b"{}"))
    asyncio.run(old.start_batch(batch.id, 1, None))
    (tmp_path / "store" / "lock").unlink()
    new = Store(tmp_path / "store")

    async def main() -> None:
        running = await old.get_batch(batch.id)
        for write in (
            upload(old),
            old.add_results(batch.id, [LineResult(1, True, b"late")]),
            old.cancel_batch(batch.id),
            old.delete_file(batch.input_file_id),
            old.publish_batch(running, BatchStatus.EXPIRED, max_line_bytes=9, missing_line=None),
        ):
            with pytest.raises(LeaseLostError):
                await write
        assert await new.finished_lines(batch.id) == set()
        await new.add_results(batch.id, [LineResult(1, True, b"mine")])
        done = await new.publish_batch(running, BatchStatus.EXPIRED, max_line_bytes=9, missing_line=None)
        assert done and done.output_file_id
        with pytest.raises(LeaseLostError):
            await old.publish_batch(running, BatchStatus.EXPIRED, max_line_bytes=9, missing_line=None)
        assert await content(new, done.output_file_id) == b"mine\n"

    asyncio.run(main())
    for store in (old, new):
        asyncio.run(store.close())


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    asyncio.run(Store(tmp_path / "store").close())
    connection = sqlite3.connect(tmp_path / "store" / "store.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    for _ in range(2):  # the lock is given back
        with pytest.raises(ConfigError, match="version 99"):
            Store(tmp_path / "store")


def test_an_upgrade_says_so_and_keeps_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the copy in its place the jaxserve of before has the store as it was."""
    directory = tmp_path / "store"
    asyncio.run(Store(directory).close())
    assert not caplog.records, "a new store is no upgrade"
    database, copy = directory / "store.db", directory / "store.db.version-2"
    database.unlink()
    for name in ("before", "again"):
        database.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.executescript(VERSION_2 + "PRAGMA user_version = 2;")
            connection.execute("PRAGMA journal_mode = WAL")
            columns = "id, purpose, filename, bytes, created_at, stored"
            connection.execute(f"INSERT INTO files ({columns}) VALUES (?, 'batch', 'x', 3, 5, 0)", [name])
            connection.commit()
        (directory / "store.db.version-2.unfinished").write_bytes(b"of a start that was killed")
        caplog.clear()
        asyncio.run(Store(directory).close())
        told = f"the store database {database} is upgraded from version 2 to {SCHEMA_VERSION}"
        assert [record.getMessage() for record in caplog.records] == [
            f"{told}; a copy for the jaxserve of before is {copy}"
        ]
        assert {path.name for path in directory.glob("store.db*")} == {"store.db", copy.name}
        with contextlib.closing(sqlite3.connect(f"{copy.as_uri()}?mode=ro", uri=True)) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (2,)
            assert connection.execute("SELECT id FROM files").fetchall() == [(name,)]
        caplog.clear()
        asyncio.run(Store(directory).close())
        assert not caplog.records, "once"
    remove(directory)
    assert not directory.exists()


def test_an_upgrade_without_room_for_the_copy_changes_nothing(tmp_path: Path) -> None:
    class Full(Disk):
        def rename(self, source: Path, target: Path) -> None:
            if "version-2" in target.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().rename(source, target)

    asyncio.run(Store(tmp_path / "store").close())
    database = tmp_path / "store" / "store.db"
    database.unlink()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(VERSION_2 + "PRAGMA user_version = 2;")
    with pytest.raises(ConfigError, match="No space left") as error:
        Store(tmp_path / "store", disk=Full())
    assert error.value.fix == "make room on its disk"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    assert not list(database.parent.glob("store.db.version*"))


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    asyncio.run(Store(tmp_path / "store").close())
    (tmp_path / "store" / "store.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Store(tmp_path / "store")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(tmp_path / "store")


async def _discarding_upload(store: Store) -> None:
    incoming = store.begin_upload()
    try:
        await incoming.write(b"x" * 2**21)
        await incoming.finish(filename="a", purpose="batch", expires_seconds=None)
    except StorageError:
        await incoming.discard()
        raise


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "rename", "sync_directory", "commit"])
def test_an_upload_that_fails_leaves_nothing(failing: Store, disk: FailingDisk, operation: str, tmp_path: Path) -> None:
    async def main() -> None:
        disk.failing = {operation}
        with pytest.raises(StorageError, match=FULL) as error:
            await _discarding_upload(failing)
        assert error.value.status == 507
        disk.failing = set()
        assert (await failing.list_files(limit=9)).items == []
        assert (await upload(failing)).bytes == 3

    asyncio.run(main())


@pytest.mark.parametrize("operation", ["write", "fsync", "rename", "sync_directory", "commit"])
def test_a_discarded_upload_takes_no_room(failing: Store, disk: FailingDisk, operation: str, tmp_path: Path) -> None:
    disk.failing = {operation}
    with pytest.raises(StorageError):
        asyncio.run(_discarding_upload(failing))
    assert [*(tmp_path / "store" / "tmp").iterdir(), *(tmp_path / "store" / "files").iterdir()] == []


@pytest.mark.parametrize(("code", "words"), [(errno.EIO, "Input/output"), (errno.EROFS, "Read-only")])
def test_other_disk_errors_are_named(failing: Store, disk: FailingDisk, code: int, words: str) -> None:
    disk.code, disk.failing = code, {"fsync"}
    with pytest.raises(StorageError, match=words):
        asyncio.run(_discarding_upload(failing))


def test_a_commit_that_fails_changes_nothing(failing: Store, disk: FailingDisk) -> None:
    async def main() -> None:
        batch = await new_batch(failing, b"{}")
        await failing.start_batch(batch.id, 1, None)
        before = await failing.get_batch(batch.id)
        disk.failing = {"commit"}
        with pytest.raises(StorageError):
            await failing.add_results(batch.id, [LineResult(1, True, b"x")])
        with pytest.raises(StorageError):
            await failing.cancel_batch(batch.id)
        assert await failing.get_batch(batch.id) == before
        assert await failing.finished_lines(batch.id) == set()
        disk.failing = set()
        await failing.add_results(batch.id, [LineResult(1, True, b"x")])

    asyncio.run(main())


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "rename", "sync_directory", "commit"])
def test_publishing_is_all_or_nothing_and_may_be_tried_again(
    failing: Store, disk: FailingDisk, operation: str, tmp_path: Path
) -> None:
    async def main() -> None:
        batch = await new_batch(failing, b"{}")
        await failing.start_batch(batch.id, 2, None)
        await failing.add_results(batch.id, [LineResult(1, True, b"x"), LineResult(2, False, b"y")])
        batch = await failing.get_batch(batch.id)
        disk.failing = {operation}
        for _ in range(3):
            with pytest.raises(StorageError):
                await failing.publish_batch(batch, BatchStatus.EXPIRED, max_line_bytes=9, missing_line=None)
        assert await failing.get_batch(batch.id) == batch
        assert (await failing.list_files(limit=9, purpose="batch_output")).items == []
        assert len(list((tmp_path / "store" / "files").iterdir())) <= 3  # attempts do not pile up
        assert list((tmp_path / "store" / "tmp").iterdir()) == []
        disk.failing = set()
        done = await failing.publish_batch(batch, BatchStatus.EXPIRED, max_line_bytes=9, missing_line=None)
        assert done and done.output_file_id and done.error_file_id
        assert await content(failing, done.output_file_id) == b"x\n"
        assert await content(failing, done.error_file_id) == b"y\n"

    asyncio.run(main())


def test_a_disk_that_is_really_full(tiny_disk: Path, tmp_path: Path) -> None:
    store = Store(tiny_disk)

    async def main() -> None:
        batch = await new_batch(store, b"{}")
        await store.start_batch(batch.id, 1, None)
        ballast = tiny_disk / "ballast"
        with pytest.raises(OSError, match="No space left"):
            ballast.write_bytes(b"x" * 2**22)
        with pytest.raises(StorageError, match=FULL):
            await _discarding_upload(store)
        payload = LineResult(1, True, b"x" * 300_000)
        with pytest.raises(StorageError, match=FULL):
            await store.add_results(batch.id, [payload])
        assert (await store.get_batch(batch.id)).completed == 0
        ballast.unlink()
        await store.add_results(batch.id, [payload])
        running = await store.get_batch(batch.id)
        assert running.completed == 1
        with pytest.raises(OSError, match="No space left"):
            ballast.write_bytes(b"x" * 2**22)
        with pytest.raises(StorageError, match=FULL):
            await store.publish_batch(running, BatchStatus.EXPIRED, max_line_bytes=9, missing_line=None)
        ballast.unlink()
        done = await store.publish_batch(running, BatchStatus.EXPIRED, max_line_bytes=9, missing_line=None)
        assert done and done.output_file_id
        assert len(await content(store, done.output_file_id)) == 300_001

    asyncio.run(main())
    asyncio.run(store.close())
    assert integrity(tmp_path) == "ok"


def test_a_disk_that_is_really_read_only(tiny_disk: Path) -> None:
    asyncio.run(Store(tiny_disk).close())
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    with pytest.raises(ConfigError, match="Read-only"):
        Store(tiny_disk)


def test_deleting_makes_room_on_a_full_disk(tiny_disk: Path) -> None:
    store = Store(tiny_disk)

    async def main() -> None:
        file = await upload(store, b"x" * 700_000)
        with pytest.raises(OSError, match="No space left"):
            (tiny_disk / "ballast").write_bytes(b"x" * 2**22)
        await store.delete_file(file.id)
        assert (await upload(store, b"x" * 600_000)).bytes == 600_000

    asyncio.run(main())
    asyncio.run(store.close())
