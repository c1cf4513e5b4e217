"""Which directories a store uses, and that it removes nothing that it did not make."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.store import Store
from jaxserve.store.directory import MARK, remove
from tests.store.helpers import content, upload


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every name below a directory, with the bytes of files."""
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


def plant(directory: Path, *names: str) -> dict[str, bytes | None]:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"three years of work: {name}".encode())
    return tree(directory)


def open_and_close(directory: Path) -> None:
    asyncio.run(Store(directory).close())


@pytest.mark.parametrize(
    "names",
    [
        ("thesis.tex",),
        ("files/thesis.tex",),
        ("tmp/deep/draft.txt",),
        ("files/file-of-mine",),
        ("tmp/0123456789abcdef01234567.txt",),
        ("store.db", "thesis.tex"),
        (".hidden",),
    ],
)
def test_a_directory_of_somebody_else_is_refused_and_untouched(tmp_path: Path, names: tuple[str, ...]) -> None:
    before = plant(tmp_path, *names)
    with pytest.raises(ConfigError, match="not empty and is no store") as error:
        Store(tmp_path)
    assert error.value.fix
    assert tree(tmp_path) == before


def test_somebody_elses_database_is_refused_and_untouched(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "store.db")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE files (id)")
    connection.commit()
    plant(tmp_path, "files/song.mp3")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="no store"):
        Store(tmp_path)
    assert tree(tmp_path) == before
    connection.close()


def test_what_others_put_into_a_store_stays(tmp_path: Path) -> None:
    open_and_close(tmp_path / "store")
    names = ("notes.txt", "files/thesis.tex", "files/file-of-mine", "tmp/draft.txt", "tmp/deep/draft.txt")
    plant(tmp_path / "store", *names)
    (tmp_path / "store" / "files" / f"file-{'a' * 24}").symlink_to("thesis.tex")
    (tmp_path / "store" / "tmp" / ("b" * 24)).mkdir()
    open_and_close(tmp_path / "store")
    after = tree(tmp_path / "store")
    assert after.keys() >= {*names, f"files/file-{'a' * 24}", f"tmp/{'b' * 24}"}
    remove(tmp_path / "store")
    assert {name for name, data in tree(tmp_path / "store").items() if data is not None} == {
        *names,
        f"files/file-{'a' * 24}",
    }


@pytest.mark.parametrize("marked", [True, False])
def test_a_store_of_before_the_mark_is_known_by_its_database(tmp_path: Path, marked: bool) -> None:
    store = Store(tmp_path)
    file = asyncio.run(upload(store))
    asyncio.run(store.close())
    if not marked:
        (tmp_path / MARK).unlink()
    plant(tmp_path, "stderr.txt", "files/notes.txt")
    store = Store(tmp_path)
    assert asyncio.run(content(store, file.id)) == b"{}\n"
    asyncio.run(store.close())
    assert (tmp_path / MARK).read_text() == "1\n"
    assert (tmp_path / "files" / "notes.txt").is_file()


@pytest.mark.parametrize(
    "names", [(), ("lock",), ("lock", "tmp/mark"), (f"tmp/{'0' * 24}", f"files/file-{'0' * 24}", "lock")]
)
def test_a_start_that_was_cut_short_is_no_obstacle(tmp_path: Path, names: tuple[str, ...]) -> None:
    plant(tmp_path, *names)
    (tmp_path / "lost+found").mkdir()  # the root of a volume
    open_and_close(tmp_path)
    assert (tmp_path / MARK).is_file() and (tmp_path / "lost+found").is_dir()
    assert not list((tmp_path / "tmp").iterdir()) and not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("version", ["2", "", "1.5", "x" * 5000])
def test_a_mark_of_another_version_is_refused(tmp_path: Path, version: str) -> None:
    open_and_close(tmp_path)
    (tmp_path / MARK).write_text(version)
    with pytest.raises(ConfigError, match="has version") as error:
        Store(tmp_path)
    assert len(str(error.value)) < 500


def test_a_store_can_be_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    asyncio.run(upload(store))
    asyncio.run(store.close())
    remove(tmp_path / "store")
    assert not (tmp_path / "store").exists()
