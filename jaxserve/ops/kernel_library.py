"""Compile the C kernels of `native` once, with the machine's C compiler, and cache the library. No jax here.

The file's name is a hash of the sources, the jaxlib version and the processor, so a directory shared by several
machines has one library for each. A cached library needs no compiler. A checksum follows the library in its file: if a
power cut left a file without some of its blocks, loading it would kill the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.system import OpenDirectory, opened, user_cache
from jaxserve.transport.socket_directory import scratch_directory

FOLDER = Path(__file__).parent / "native"
SOURCES = (  # the longest to compile first
    "matmul_rounded_few.c",
    "matmul_rounded.c",
    "matmul_rounded_few_avx2.c",
    "matmul_rounded_few_neon.c",
    "matmul_few.c",
    "paged_attention.c",
    "prompt_attention.c",
    "recurrent_state.c",
    "matmul.c",
    "matmul_grouped.c",
)
# -Wno-psabi: vectors wider than the processor's registers are passed only between functions of one file.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
# Timeout. A file takes at most two seconds of a processor, but all are compiled at once, beside other programs:
# with a tenth of a processor each of them takes minutes.
COMPILE_SECONDS = 600.0
_DIGEST = hashlib.sha256().digest_size  # bytes


def build(directory: Path, flags: Sequence[str] = FLAGS) -> Path:
    """Compile the library into `directory` unless it exists, and return its path.

    Raises ConfigError with the reason if it cannot be compiled.
    """
    path = directory / library_name(flags)
    if not path.exists():
        compiler = _compiler()
        with tempfile.TemporaryDirectory(prefix="objects-", dir=directory) as objects, ThreadPoolExecutor() as pool:
            made = [str(Path(objects) / f"{name}.o") for name in SOURCES]
            to_object = [*compiler, *(flag for flag in flags if flag != "-shared"), "-I", _headers(), "-c"]
            commands = [[*to_object, str(FOLDER / name), "-o", path] for name, path in zip(SOURCES, made, strict=True)]
            list(pool.map(_compile, commands))
            _compile([*compiler, *flags, *made, "-o", str(path), "-lm"])
    return path


def compile_ahead() -> None:
    """Compile the library into the user's cache if it is missing. The call that needs it raises the errors."""
    with (
        contextlib.suppress(ConfigError, OSError),
        scratch_directory() as scratch,
        opened(user_cache("kernels")) as cache,
    ):
        kept(cache, scratch)


def kept(cache: OpenDirectory, scratch: Path, flags: Sequence[str] = FLAGS) -> str:
    """Return a path of the library in `cache`, compiled first if missing. The path is valid while the cache is open.

    scratch: a private directory for the compiler's output. Raises OSError if the cache cannot be written.
    """
    name = library_name(flags)
    if not _is_sound(cache.descriptor, name):
        with _locked(cache.descriptor):  # another thread or process may be compiling it
            if not _is_sound(cache.descriptor, name):
                _put(cache.descriptor, name, build(scratch, flags))
    return cache.file(name)


@contextlib.contextmanager
def _locked(cache: int) -> Iterator[None]:
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=cache)
    try:
        with contextlib.suppress(OSError):  # on a file system without locks each process compiles its own
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_sound(cache: int, name: str) -> bool:
    """Return whether `name` is a whole library in a regular file that only this user or root can have written."""
    try:
        info = os.stat(name, dir_fd=cache, follow_symlinks=False)
    except FileNotFoundError:
        return False
    others = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0) or others:
        return False
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=cache), "rb") as file:
        data = file.read()
    return hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def _put(cache: int, name: str, made: Path) -> None:
    """Write the library and its checksum under a temporary name and rename the file.

    Another process therefore never sees half of it.
    """
    temporary = f".{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=cache)
    try:
        with open(descriptor, "wb") as file:
            library = made.read_bytes()
            file.write(library + hashlib.sha256(library).digest())
        os.rename(temporary, name, src_dir_fd=cache, dst_dir_fd=cache)
    except BaseException:
        os.unlink(temporary, dir_fd=cache)
        raise


def _compiler() -> list[str]:
    try:
        asked = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise ConfigError(f"CC is no command: {error}", fix="set CC, or unset it") from error
    if asked:
        if shutil.which(asked[0]) is None:
            raise ConfigError(f"the C compiler of CC, {asked[0]!r}, is not there", fix="set CC, or unset it")
        return asked
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise ConfigError("there is no C compiler for the CPU's kernels", fix="install gcc or clang, or set CC")


def _headers() -> str:
    """Return the same directory as jax.ffi.include_dir, without importing jax."""
    spec = find_spec("jaxlib")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "include")


def _compile(command: Sequence[str]) -> None:
    fix = "set runtime.attention: xla"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the CPU's kernels cannot be compiled: {error}", fix=fix) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        reason = next((line for line in said if "error" in line), said[0])
        raise ConfigError(f"the CPU's kernels cannot be compiled by {command[0]}: {reason}", fix=fix)


def library_name(flags: Sequence[str] = FLAGS) -> str:
    """Return the file name: a hash of the sources, the flags, the jaxlib version and the processor."""
    sources = [path.read_text() for path in sorted(FOLDER.glob("*.[ch]"))]
    parts = [metadata.version("jaxlib"), *flags, platform.machine(), _processor(), *sources]
    return f"kernels-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


def _processor() -> str:
    """Return a text that identifies the processor's instruction set, as far as the system reports one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
