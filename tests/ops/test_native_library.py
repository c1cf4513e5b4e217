"""The library of the C kernels: how it is made, kept, loaded and waited for, and a machine without a compiler."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.ops import kernel_library as builder
from jaxserve.ops import native
from jaxserve.ops.paged_attention import get_backend
from jaxserve.system import opened
from jaxserve.transport.socket_directory import sweep
from tests.ops.test_native import _loaded  # noqa: F401


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel of four: its library is made in a fifth of the time."""
    monkeypatch.setattr(builder, "SOURCES", ("matmul.c",))


@pytest.mark.usefixtures("small")
def test_the_library_is_kept(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with opened(tmp_path / "cache") as cache:
        first = os.stat(builder.kept(cache, scratch))
        again = os.stat(builder.kept(cache, tmp_path / "a compiler cannot write here"))
        other = os.stat(builder.kept(cache, scratch, [*builder.FLAGS, "-DANOTHER"]))
    assert first.st_ino == again.st_ino != other.st_ino
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".so", ".so"]


def test_no_warnings(tmp_path: Path) -> None:
    assert builder.build(tmp_path, [*builder.FLAGS, "-Wall", "-Wextra", "-Werror"]).exists()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no C compiler"):
        builder.build(tmp_path)


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho 'in a file:\nfatal error: no headers' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ConfigError, match="fatal error: no headers"):
        with opened(tmp_path / "cache") as cache:
            builder.kept(cache, tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("code", [0, 1])
def test_a_compiler_that_speaks_another_encoding(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says, a warning or the reason, need not be UTF-8."""
    compiler = tmp_path / "latin-cc"
    compiler.write_bytes(
        b"#!/bin/sh\necho 'error: f\xfcr immer' >&2\n: > $(echo $* | sed 's/.*-o //; s/ .*//')\nexit %d\n" % code
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    if code:
        with pytest.raises(ConfigError, match=r"error: f.r immer"):
            builder.build(tmp_path)
    else:
        assert builder.build(tmp_path).exists()


def test_what_is_no_command_in_cc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc '-O2")
    with pytest.raises(ConfigError, match=r"CC.*No closing quotation"):
        builder.build(tmp_path)


def test_without_a_temporary_directory_auto_is_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    assert get_backend("auto", "cpu").name == "xla"


def test_without_kernels_auto_is_xla_and_native_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConfigError("there is no C compiler for the CPU's kernels")

    monkeypatch.setattr(native, "load", refuse)
    assert get_backend("auto", "cpu").name == "xla"
    with pytest.raises(ConfigError, match="no C compiler"):
        get_backend("native", "cpu")


@pytest.fixture
def scratch(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private directory for the compiler, beside a cache in tmp_path / jaxserve / kernels.

    A path that was loaded before in this process is not read again, and descriptors have the same numbers.
    """
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda path: load(os.path.realpath(path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


@pytest.mark.parametrize("spoil", ["a file in its place", "others can write", "no home", "a link", "a full disk"])
def test_without_a_safe_cache_the_library_is_made_anew(
    spoil: str, scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = scratch.parent / "jaxserve" / "kernels"
    kept.mkdir(parents=True)
    if spoil == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", _no_home)
    elif spoil == "others can write":
        kept.chmod(0o777)
    elif spoil == "a full disk":
        monkeypatch.setattr(builder, "_put", _no_space)
    elif spoil == "a link":
        (kept / builder.library_name()).symlink_to(scratch / "elsewhere.so")
        (scratch / "elsewhere.so").write_bytes(b"not a library")
    else:
        kept.rmdir()
        kept.write_text("")
    assert native._open(scratch).jaxserve_matmul is not None
    if spoil == "a link":  # replaced by the library, and not followed
        assert (kept / builder.library_name()).stat().st_size > 1000
        assert (scratch / "elsewhere.so").read_bytes() == b"not a library"
    else:
        assert caplog.text.count("kernels are not kept") == 1


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _no_home() -> Path:
    raise RuntimeError("could not determine home directory")


def test_a_library_that_others_could_have_written_is_made_anew(scratch: Path) -> None:
    native._open(scratch)
    path = scratch.parent / "jaxserve" / "kernels" / builder.library_name()
    made = path.stat().st_ino
    path.chmod(0o666)
    native._open(scratch)
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_ino != made


@pytest.mark.parametrize("size", [0, 100])
def test_a_library_that_was_cut_short_is_made_anew(scratch: Path, size: int) -> None:
    path = scratch.parent / "jaxserve" / "kernels" / builder.library_name()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * size)
    assert native._open(scratch).jaxserve_matmul is not None
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("left", ["its first half", "its first page, and zeros"])
@pytest.mark.usefixtures("small")
def test_a_library_that_a_power_cut_damaged_is_made_anew(left: str, tmp_path: Path) -> None:
    """It is not loaded here: if it is kept, the system ends the process with a signal."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with opened(tmp_path / "cache") as cache:
        path = Path(builder.kept(cache, scratch))
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if "half" in left else whole[:4096].ljust(len(whole), b"\0"))
        assert Path(builder.kept(cache, scratch)).read_bytes() == whole


@pytest.mark.usefixtures("small")
def test_the_compiler_of_cc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(ConfigError, match="no-such-compiler"):
        builder.build(tmp_path)
    monkeypatch.setenv("CC", "env cc")
    assert builder.build(tmp_path).exists()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert builder.build(tmp_path).exists()  # what is there needs no compiler


@pytest.mark.usefixtures("small")
def test_a_library_that_is_being_compiled_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first compiles only when the others are at its lock."""
    built: list[Path] = []
    arrived: list[int] = []
    all_arrived = threading.Event()
    build, locked = builder.build, builder._locked

    def counted(directory: Path, flags: Sequence[str]) -> Path:
        built.append(directory)
        assert all_arrived.wait(200)
        return build(directory, flags)

    def watched(cache: int) -> AbstractContextManager[None]:
        arrived.append(cache)
        if len(arrived) == 3:
            all_arrived.set()
        return locked(cache)

    monkeypatch.setattr(builder, "_locked", watched)
    monkeypatch.setattr(builder, "build", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = [threading.Thread(target=builder.compile_ahead) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    [kept] = (tmp_path / "jaxserve" / "kernels").iterdir()
    assert kept.name == builder.library_name() and kept.stat().st_size > 1000


def test_what_prevents_compiling_ahead_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    builder.compile_ahead()
    assert list((tmp_path / "jaxserve" / "kernels").iterdir()) == []


def test_a_process_that_is_killed_while_it_compiles_leaves_nothing(tmp_path: Path) -> None:
    """The next start of an engine removes its directory."""
    compiler, folder = tmp_path / "cc", tmp_path / "tmp"
    compiler.write_text("#!/bin/sh\nkill -9 $PPID\n")
    compiler.chmod(0o700)
    folder.mkdir()
    own = {"CC": str(compiler), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(tmp_path)}
    program = "from jaxserve.ops.kernel_library import compile_ahead; compile_ahead()"
    killed = subprocess.run([sys.executable, "-c", program], env={**os.environ, **own}, check=False)
    assert killed.returncode == -signal.SIGKILL and len(left := list(folder.iterdir())) == 1
    assert sweep(folder) == left and list(folder.iterdir()) == []
