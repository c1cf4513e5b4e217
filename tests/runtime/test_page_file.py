"""The file of KV pages: what a later process finds in it, and what it must not find."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.runtime.host_pages import HostPool, HostPools
from jaxserve.runtime.page_file import PageFile, PageFileConfig, fingerprint, remove_unused
from jaxserve.types.step import PageMove
from tests.waiting import wait_until

PAGE = 1000  # bytes
RECORDS = 4096  # offset of the first record


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def write(file: PageFile, slot: int, number: int) -> None:
    file.begin([slot])
    file.rows[slot] = number
    file.end([slot], [digest(number)])


def opened(directory: Path, name: str = "model", num_slots: int = 4) -> PageFile:
    return PageFile(PageFileConfig(directory, name), num_slots, PAGE)


def found(directory: Path, name: str = "model") -> dict[int, bytes | None]:
    """What a new process finds."""
    file = opened(directory, name)
    wait_until(lambda: len(file.checked) == len(file.to_check), "every page is checked")
    file.close()
    pages = dict(file.checked)
    for slot, page in pages.items():
        if page is not None and page == digest(page[0]):
            assert (file.rows[slot] == page[0]).all()
    return pages


@pytest.fixture
def file(tmp_path: Path) -> Iterator[PageFile]:
    """Three pages, closed."""
    file = opened(tmp_path)
    for slot in range(3):
        write(file, slot, slot + 1)
    file.close()
    yield file


def test_pages_are_found_again(file: PageFile, tmp_path: Path) -> None:
    assert file.to_check == []
    assert found(tmp_path) == {0: digest(1), 1: digest(2), 2: digest(3)}


def test_pages_of_another_model_are_removed_and_never_found(file: PageFile, tmp_path: Path) -> None:
    assert found(tmp_path, name="other") == {}
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["other"]
    assert found(tmp_path) == {}


def test_a_flipped_bit_is_a_lost_page(file: PageFile, tmp_path: Path) -> None:
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    place = len(data) - 3 * PAGE + 17  # in the second page
    data[place] ^= 4
    path.write_bytes(data)
    assert found(tmp_path) == {0: digest(1), 1: None, 2: digest(3)}


def test_a_flipped_bit_of_a_record_is_a_lost_page(file: PageFile, tmp_path: Path) -> None:
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for bit in range(0, 40 * 8, 7):  # the first record
        data = bytearray(whole)
        data[RECORDS + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert found(tmp_path).get(0) is None or bit >= 36 * 8, "a flag that is still set"


def test_a_page_that_is_half_written_is_not_found(tmp_path: Path) -> None:
    file = opened(tmp_path)
    write(file, 0, 1)
    write(file, 1, 2)
    file.begin([1])
    file.rows[1][: PAGE // 2] = 3  # the process dies here
    file.close()
    assert found(tmp_path) == {0: digest(1)}


def test_an_overwritten_page_has_its_last_record(tmp_path: Path) -> None:
    file = opened(tmp_path)
    for number in range(1, 200):
        write(file, 0, number)
    file.close()
    assert found(tmp_path) == {0: digest(199)}


def test_a_cleared_file_is_empty(tmp_path: Path) -> None:
    file = opened(tmp_path)
    for slot in range(3):
        write(file, slot, slot + 1)
    file.clear()
    write(file, 3, 4)
    file.close()
    assert found(tmp_path) == {3: digest(4)}


def test_one_server_at_a_time(tmp_path: Path) -> None:
    file = opened(tmp_path)
    write(file, 0, 1)
    with pytest.raises(ConfigError, match="another server uses this directory"):
        opened(tmp_path)
    other = opened(tmp_path, "other")
    assert len(list(tmp_path.iterdir())) == 2, "a file in use is not removed"
    other.close()
    file.close()


def test_files_of_others_stay(file: PageFile, tmp_path: Path) -> None:
    (ours,) = tmp_path.iterdir()
    (tmp_path / "telephone.pages").write_bytes(b"yellow")
    (tmp_path / "empty.pages").touch()
    (tmp_path / "directory.pages").mkdir()
    (tmp_path / "link.pages").symlink_to(ours)
    opened(tmp_path, "other").close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"telephone.pages", "empty.pages", "directory.pages", "link.pages", "other-4-1000.pages"}


def test_two_models_that_start_at_once_keep_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one removes the file between the moments when it is made and when it is locked."""
    flock, files = fcntl.flock, []

    def late(file: int, operation: int) -> None:
        if not files:
            files.append(None)
            files.append(opened(tmp_path, "other"))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    file = opened(tmp_path)
    write(file, 0, 1)
    file.close()
    files[1].close()
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} >= {"model"}
    assert found(tmp_path) == {0: digest(1)}


def test_a_start_waits_for_another_that_looks_at_its_file(file: PageFile, tmp_path: Path) -> None:
    (path,) = tmp_path.iterdir()
    other = os.open(path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    threading.Timer(0.05, os.close, [other]).start()
    assert found(tmp_path) == {0: digest(1), 1: digest(2), 2: digest(3)}


def test_a_file_is_closed_once_and_at_once(file: PageFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, checks = threading.Event(), []

    def slow(*_: object) -> int:
        checks.append(gate.wait())
        return 0

    monkeypatch.setattr(zlib, "crc32", slow)
    file = opened(tmp_path)
    threading.Timer(0.5, gate.set).start()
    file.close()
    file.close()
    assert len(file.to_check) == 3 and len(file.checked) < 3 and len(checks) == 2, "of a digest and its page"
    monkeypatch.undo()
    assert found(tmp_path) == {0: digest(1), 1: digest(2), 2: digest(3)}


class Transfer:
    """Pages of the device: page i holds i, in one array."""

    def gather(self, caches: object, page_ids: Sequence[int], group: int) -> Iterator[tuple[Any, int]]:
        yield (jax.numpy.full((8, PAGE), np.array([*page_ids, *[0] * 8][:8])[:, None], np.uint8),), len(page_ids)


def pool_of(directory: Path) -> HostPool:
    page = (jax.ShapeDtypeStruct((1, PAGE), np.uint8),)
    return HostPool(cast(Any, Transfer()), page, 4, PageFileConfig(directory, "model"))


def stored(number: int, slot: int, group: int = 0) -> PageMove:
    return PageMove("store", number, slot, digest(number), group)


def test_each_layer_group_has_its_file_and_one_without_layers_only_its_digests(tmp_path: Path) -> None:
    page = (jax.ShapeDtypeStruct((1, PAGE), np.uint8),)
    moves = [stored(1, 0), stored(2, 1), stored(3, 0, group=1), PageMove("load", 5, 1)]
    found = []
    for _ in range(2):
        pools = HostPools(cast(Any, Transfer()), [(), page], (4, 2), PageFileConfig(tmp_path, "model"))
        files = [file for file in pools.files if file is not None]
        wait_until(lambda files=files: all(len(file.checked) == len(file.to_check) for file in files), "checked")
        found = [dict(file.checked) for file in files]
        pools.move((), moves)
        pools.move((), [])
        pools.close()
    assert found == [{0: digest(1), 1: digest(2)}, {0: digest(3)}]


def test_a_model_without_windows_removes_the_pages_of_one_with_them(tmp_path: Path) -> None:
    page, empty = (jax.ShapeDtypeStruct((1, PAGE), np.uint8),), cast(Any, Transfer())
    first = HostPools(empty, [page, page], (4, 2), PageFileConfig(tmp_path, "windows"))
    HostPools(empty, [page, ()], (4, 0), PageFileConfig(tmp_path, "other")).close()
    assert len(list(tmp_path.rglob("*.pages"))) == 3, "a running server keeps its files"
    first.close()
    HostPools(empty, [page, ()], (4, 0), PageFileConfig(tmp_path, "other")).close()
    assert [path.name for path in tmp_path.rglob("*.pages")] == ["other-4-1000.pages"]


def test_files_of_another_number_of_engines_are_removed(tmp_path: Path) -> None:
    def folders() -> set[str]:
        return {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("*.pages")}

    engines = [tmp_path / f"engine-{index}" for index in range(3)]
    for folder in (tmp_path, tmp_path / "window", *engines, engines[2] / "window", tmp_path / "other"):
        opened(folder).close()
    remove_unused(engines[0], 2)
    assert folders() == {"engine-0", "engine-1", "other"}
    opened(tmp_path).close()
    running = opened(engines[1])
    remove_unused(tmp_path, 1)
    assert folders() == {".", "engine-1", "other"}, "a running server keeps its file"
    running.close()


def test_a_slot_that_is_stored_twice_in_a_step_has_the_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, ends = pool_of(tmp_path), []
    assert pool.file is not None
    monkeypatch.setattr(pool.file, "end", lambda *given: ends.append(given))
    pool.move((), [stored(1, 0), stored(2, 1), stored(3, 0)])
    pool.settle()
    assert ends == [([0, 1], [digest(3), digest(2)])]
    assert pool.file.rows[0][0] == 3
    pool.close()


def test_dropped_pages_are_not_found_by_a_later_process(tmp_path: Path) -> None:
    pool = pool_of(tmp_path)
    pool.move((), [stored(1, 0), stored(2, 1), stored(3, 2)])
    pool.move((), [stored(4, 3), PageMove("drop", slot=0), PageMove("drop", slot=3), stored(5, 0)])
    pool.settle()
    pool.close()
    assert found(tmp_path) == {0: digest(5), 1: digest(2), 2: digest(3)}


@pytest.mark.parametrize("size", [0, RECORDS + 4096 + PAGE])
def test_a_file_that_is_cut_loses_its_pages_and_not_the_process(size: int, tmp_path: Path) -> None:
    pool = pool_of(tmp_path)
    assert pool.file is not None
    pool.move((), [stored(1, 0), stored(2, 1)])
    pool.settle()
    os.truncate(next(tmp_path.iterdir()), size)
    with pytest.raises(OSError, match=r"cache.disk was cut"):
        pool.move((), [PageMove("load", 5, 1)])
    assert list(pool.file.checked) == [(slot, None) for slot in range(4)]
    pool.move((), [stored(3, 0)])
    pool.settle()
    pool.close()
    assert found(tmp_path) == {0: digest(3)}


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"cache\.disk: other users can write to"):
        opened(tmp_path / "open")
    (tmp_path / "a file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cache\.disk: .* cannot be used"):
        opened(tmp_path / "a file")
    (tmp_path / "model-2-1000.pages").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"cache\.disk: model-2-1000\.pages is there and no file of KV pages"):
        opened(tmp_path, num_slots=2)
    assert (tmp_path / "model-2-1000.pages").read_bytes() == b"mine"
    with pytest.raises(ConfigError, match=r"cache\.disk: no room for"):
        opened(tmp_path, num_slots=2**44)
    assert not list(tmp_path.glob(f"model-{2**44}*")), "what was made for it is removed"


def test_a_disk_that_is_full_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=r"cache\.disk: .*No space left"):
        opened(tmp_path)
    monkeypatch.undo()
    opened(tmp_path).close()


def test_the_fingerprint_changes_with_the_files_and_the_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint(tmp_path, "float32", 16)
    assert first == fingerprint(tmp_path, "float32", 16) != fingerprint(tmp_path, "float32", 32)
    assert fingerprint(tmp_path / "config.json", "float32", 16) != first
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    os.utime(weights, (0, 0))
    with_weights = fingerprint(tmp_path, "float32", 16)
    weights.write_bytes(b"Weights")
    os.utime(weights, (0, 0))  # as images of containers are made
    assert len({fingerprint(tmp_path, "float32", 16), with_weights, first}) == 3


def test_a_group_without_a_file_gives_the_others_back(tmp_path: Path) -> None:
    """An engine that could not start is tried again in the same process, with other sizes."""
    page, file = jax.ShapeDtypeStruct((1, PAGE), np.uint8), PageFileConfig(tmp_path, "model")
    (tmp_path / "window").write_text("no directory")
    with pytest.raises(ConfigError, match=r"cache\.disk"):
        HostPools(cast(Any, Transfer()), [page, page], (4, 2), file)
    (tmp_path / "window").unlink()
    HostPools(cast(Any, Transfer()), [page, page], (4, 2), file).close()
