"""`jaxserve store`: a copy made while the store is written holds all that it names, and a look changes nothing."""

import asyncio
import contextlib
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from jaxserve.store import Store, maintenance
from jaxserve.store.database import SCHEMA_VERSION
from jaxserve.store.maintenance import backup, check, restore
from tests.store.helpers import content, new_batch, upload
from tests.store.test_response_store import VERSION_2


def test_a_backup_of_a_store_in_use_is_a_whole_store(tmp_path: Path) -> None:
    """Files come and go while it is copied. Every file that the copy lists can be read."""
    store = Store(tmp_path / "store")
    (tmp_path / "store" / "sealing-key").write_bytes(b"k" * 32)
    kept = asyncio.run(upload(store, b'{"kept": 1}\n'))
    ended = threading.Event()

    async def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            batch = await new_batch(store, b"%d\n" % number)
            if number % 2:
                await store.delete_file(batch.input_file_id)

    thread = threading.Thread(target=lambda: asyncio.run(write()))
    thread.start()
    try:
        for number in range(5):
            copy = tmp_path / f"copy-{number}"
            report = backup(tmp_path / "store", copy)
            assert report.damage is None and not report.unknown and not report.holder
            put_back = tmp_path / f"back-{number}"
            assert restore(copy, put_back).rows == report.rows
            opened = Store(put_back)
            files = asyncio.run(opened.list_files(limit=10_000)).items
            assert kept.id in {each.id for each in files}
            assert all(len(asyncio.run(content(opened, each.id))) == each.bytes for each in files)
            assert (put_back / "sealing-key").read_bytes() == b"k" * 32
            asyncio.run(opened.close())
    finally:
        ended.set()
        thread.join()
        asyncio.run(store.close())
    assert check(tmp_path / "store").damage is None


def test_a_file_that_is_deleted_while_a_store_is_checked_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "store"
    asyncio.run(Store(directory).close())
    monkeypatch.setattr(maintenance, "own_files", lambda *args: [directory / "files" / "gone"])
    assert check(directory).unknown == []


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = tmp_path / ".local" / "share" / "jaxserve"
    store = Store(directory)
    file = asyncio.run(upload(store, b"{}\n"))
    assert main(["store", "check"]) == 0
    assert "1 files, 0 batches" in (said := capsys.readouterr().out) and "in use by process" in said
    assert main(["store", "backup", str(tmp_path / "copy")]) == 0
    assert main(["store", "backup", str(tmp_path / "copy")]) == 2
    assert main(["store", "upgrade"]) == 2, "it is in use"
    asyncio.run(store.close())
    assert main(["store", "restore", str(tmp_path / "copy"), str(directory)]) == 2
    assert "is not an empty directory" in capsys.readouterr().err
    assert main(["store", "restore", str(tmp_path / "copy"), str(directory / "store.db")]) == 2
    shutil.rmtree(directory)
    assert main(["store", "restore", str(tmp_path / "copy"), str(directory)]) == 0
    assert main(["store", "upgrade"]) == 0
    (directory / "files" / file.id).unlink()
    capsys.readouterr()
    assert main(["store", "check"]) == 1
    assert f"missing: the contents of {file.id}" in capsys.readouterr().out
    for words in (["check", str(tmp_path)], ["mend"], ["check", "a", "b"], ["backup"], ["check", "--config", "x"]):
        assert main(["store", *words]) == 2
    assert main(["store", "backup", str(directory), str(directory / "inside")]) == 2
    (tmp_path / "copy" / "store.db").write_bytes(b"no database" * 1000)
    assert main(["store", "check", str(tmp_path / "copy")]) == 2
    assert main(["store", "restore", str(tmp_path / "copy"), str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_an_earlier_version_is_checked_copied_and_upgraded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "store"
    asyncio.run(Store(directory).close())
    database = directory / "store.db"
    database.unlink()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(VERSION_2 + "PRAGMA user_version = 2;")
    before = database.read_bytes()
    assert check(directory).version == 2 and backup(directory, tmp_path / "copy").version == 2
    assert database.read_bytes() == before
    assert main(["store", "upgrade", str(directory)]) == 0
    assert f"version 2 is now {SCHEMA_VERSION}" in capsys.readouterr().out
    assert check(tmp_path / "copy").version == 2, "the way back"
