"""The log of the database: it stays small, and on a full disk it gives back the room that it has."""

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError, DiskFullError, StorageError
from jaxserve.store import Disk, Store
from jaxserve.store.database import LOG_PAGES, PAGE_BYTES, Database
from tests.store.disks import FailingDisk
from tests.store.helpers import new_batch

LOG_BYTES = LOG_PAGES * PAGE_BYTES


def fill(disk: Path, but: int = 0) -> None:
    """Leave `but` bytes free."""
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(b"x" * 2**22)
    os.truncate(ballast, ballast.stat().st_size - but)


def log_size(directory: Path) -> int:
    return (directory / "store.db-wal").stat().st_size


@contextlib.contextmanager
def database(directory: Path) -> Iterator[Database]:
    directory.mkdir(exist_ok=True)
    opened = Database(directory / "store.db", Disk())
    yield opened
    opened.close()


def small_commits(database: Database, count: int) -> None:
    """Each changes one page, which exists."""
    for number in range(count):
        database.write_blocking(
            lambda connection, n: connection.execute("UPDATE lease SET owner = ?", (n,)), str(number)
        )


def add_bytes(database: Database, size: int) -> None:
    statement = "INSERT INTO idempotency VALUES ('', ?, ?, ?, 0)"
    values = (secrets.token_hex(8), b"", bytes(size))
    database.write_blocking(lambda connection: connection.execute(statement, values))


def test_the_log_stays_small(tmp_path: Path) -> None:
    with database(tmp_path) as opened:
        sizes = []
        for _ in range(40):
            add_bytes(opened, LOG_BYTES // 16)
            sizes.append(log_size(tmp_path))
        assert max(sizes) < 1.1 * LOG_BYTES


def test_the_log_is_cut_after_a_large_commit(tmp_path: Path) -> None:
    with database(tmp_path) as opened:
        add_bytes(opened, 3 * LOG_BYTES)
        assert log_size(tmp_path) > 3 * LOG_BYTES
        small_commits(opened, 2)
        assert log_size(tmp_path) <= LOG_BYTES


def test_small_commits_do_not_fill_a_small_disk(tiny_disk: Path) -> None:
    """With SQLite's own limit of 4 MiB the log is never folded into the database here, and fills the disk for good."""
    with database(tiny_disk) as opened:
        small_commits(opened, 1000)


def test_the_log_gives_its_room_to_a_write_that_needs_it(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with database(tiny_disk) as opened:
        small_commits(opened, LOG_PAGES * 3 // 4)
        fill(tiny_disk)
        add_bytes(opened, LOG_BYTES // 2)
        with pytest.raises(DiskFullError):  # what was added has to move into the database first
            add_bytes(opened, LOG_BYTES // 2)
        (tiny_disk / "ballast").unlink()
        add_bytes(opened, LOG_BYTES // 2)
    assert [record.levelname for record in caplog.records if record.levelname != "INFO"] == ["ERROR"]


def test_a_store_can_be_opened_on_a_disk_that_its_own_log_fills(tiny_disk: Path) -> None:
    """After a kill the log lies there as it was."""
    with database(tiny_disk / "store") as opened:
        small_commits(opened, LOG_PAGES * 3 // 4)
        subprocess.run(["cp", "-r", tiny_disk / "store", tiny_disk / "copy"], check=True)
    fill(tiny_disk, but=2**16)
    with database(tiny_disk / "copy") as opened:
        add_bytes(opened, LOG_BYTES // 2)


def test_no_room_to_start(tiny_disk: Path) -> None:
    (tiny_disk / "store").mkdir()
    fill(tiny_disk, but=2**14)
    with pytest.raises(ConfigError) as error:
        Store(tiny_disk / "store")
    assert error.value.fix == "make room on its disk"


def test_the_condition_and_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = FailingDisk()
    store = Store(tmp_path / "store", disk=disk)

    async def main() -> None:
        batch_id = (await new_batch(store)).id
        assert store.condition.status == "ok"
        disk.failing = {"commit"}
        for _ in range(3):
            with pytest.raises(DiskFullError):
                await store.cancel_batch(batch_id)
        assert (store.condition.status, store.condition.detail) == ("full", "The server's disk is full.")
        disk.code = 5  # EIO
        for _ in range(3):
            with pytest.raises(StorageError):
                await store.cancel_batch(batch_id)
        assert store.condition.status == "failing"
        disk.failing = set()
        await store.cancel_batch(batch_id)
        assert (store.condition.status, store.condition.detail) == ("ok", None)

    asyncio.run(main())
    asyncio.run(store.close())
    assert [message.split(":")[0] for message in caplog.messages] == [
        "the store is full",
        "the store is failing",
        "the store can be written again",
    ]
