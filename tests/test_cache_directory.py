"""A directory that holds code is used only if nobody else can change it, or exchange one on the way to it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxserve.system import CacheDirectoryError, OpenDirectory, opened, user_cache

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def refusal(path: Path) -> str:
    with pytest.raises(CacheDirectoryError) as caught, opened(path):
        pass
    return str(caught.value)


def test_it_is_made_for_this_user_only(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b") as directory:
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        (tmp_path / "a" / "b" / "x").write_text("seen")
        assert Path(directory.file("x")).read_text() == "seen"
    with opened(tmp_path / "a" / "b"):
        pass


def test_it_stays_the_same_where_its_name_is_given_to_another(tmp_path: Path) -> None:
    with opened(tmp_path / "kept") as directory:
        (tmp_path / "kept" / "x").write_text("good")
        (tmp_path / "kept").rename(tmp_path / "away")
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept" / "x").write_text("evil")
        assert Path(directory.file("x")).read_text() == "good"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_others_can_write_to_it(tmp_path: Path, mode: int) -> None:
    (tmp_path / "kept").mkdir()
    os.chown(tmp_path / "kept", -1, os.getegid())
    (tmp_path / "kept").chmod(mode)
    if mode == 0o770 and os.geteuid() != 0:
        pytest.skip("a user's own group may write")
    if mode == 0o770:
        os.chown(tmp_path / "kept", -1, OTHER)
    assert "other users can write" in refusal(tmp_path / "kept")


def test_others_can_write_to_a_directory_above_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o777)
    assert refusal(tmp_path / "a" / "b") == f"other users can write to {tmp_path / 'a'}"
    (tmp_path / "a").chmod(0o1777)  # like /tmp: nobody can rename what is ours
    with opened(tmp_path / "a" / "b"):
        pass


@as_root
@pytest.mark.parametrize("whose", ["directory", "parent", "link"])
def test_another_user_owns_it(tmp_path: Path, whose: str) -> None:
    (tmp_path / "parent").mkdir()
    path = tmp_path / "parent" / "kept"
    if whose == "link":
        (tmp_path / "safe").mkdir()
        path.symlink_to(tmp_path / "safe")
        os.lchown(path, OTHER, OTHER)
    else:
        path.mkdir()
        os.chown(path if whose == "directory" else path.parent, OTHER, OTHER)
    assert "belongs to another user (65534)" in refusal(path)


@pytest.mark.parametrize("target", ["safe", "{}/safe", "../{name}/safe"])
def test_links_of_this_user_are_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "safe").mkdir()
    (tmp_path / "link").symlink_to(target.format(tmp_path, name=tmp_path.name))
    (tmp_path / "safe" / "x").write_text("seen")
    with opened(tmp_path / "link") as directory:
        assert Path(directory.file("x")).read_text() == "seen"


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert "Not a directory" in refusal(tmp_path / "file")
    assert "Not a directory" in refusal(tmp_path / "file" / "inner")
    assert "too many links" in refusal(tmp_path / "loop")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    @contextmanager
    def same_number() -> Iterator[None]:
        before = len(os.listdir("/proc/self/fd"))
        yield
        assert len(os.listdir("/proc/self/fd")) == before

    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with same_number():
        refusal(tmp_path / "open" / "inner")
        with opened(tmp_path / "kept") as directory:
            assert isinstance(directory, OpenDirectory)


@pytest.mark.parametrize(("value", "base"), [("/x", "/x"), ("", "/home/me/.cache"), ("cache", "/home/me/.cache")])
def test_the_user_cache(monkeypatch: pytest.MonkeyPatch, value: str, base: str) -> None:
    """A relative one would be in the working directory."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert user_cache("xla") == Path(base, "jaxserve", "xla")
