"""The file of KV pages: what a later process finds in it, and what it must not find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.runtime.pages.page_file import PageFile, PageFileConfig, fingerprint
from tests.waiting import wait_until

PAGE = 1000  # bytes


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


def test_a_flipped_bit_of_a_record_is_another_prefix_or_a_lost_page(file: PageFile, tmp_path: Path) -> None:
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for bit in range(0, 40 * 8, 7):  # the first record
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert found(tmp_path).get(0) != digest(1) or bit >= 36 * 8, "a flag that is still set"


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


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"cache\.disk: other users can write to"):
        opened(tmp_path / "open")
    (tmp_path / "a file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cache\.disk: .* cannot be used"):
        opened(tmp_path / "a file")
    with pytest.raises(ConfigError, match=r"cache\.disk: no room for"):
        opened(tmp_path, num_slots=2**44)


def test_the_fingerprint_changes_with_the_files_and_the_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint(tmp_path, "float32", 16)
    assert first == fingerprint(tmp_path, "float32", 16) != fingerprint(tmp_path, "float32", 32)
    assert fingerprint(tmp_path / "config.json", "float32", 16) != first
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert fingerprint(tmp_path, "float32", 16) != first
