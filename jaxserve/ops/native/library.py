"""Compiles the kernels of this folder with the machine's own C compiler, once, and keeps the library.

Owns the file's place and name: it is of these sources, this jaxlib's interface and this processor, so that a folder of
several machines holds one library for each, and serves where the compiler is gone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax

from jaxserve.errors import ConfigError

SOURCES = ("matmul.c", "matvec.c", "paged_attention.c")
# -Wno-psabi: vectors wider than the processor's are passed between functions of one file only.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
COMPILE_SECONDS = 60.0  # it takes one


def build(directory: Path, flags: Sequence[str] = FLAGS) -> Path:
    """The library in `directory`, made if it is not there. ConfigError with the reason where it cannot be made."""
    path = directory / f"kernels-{_fingerprint(flags)}.so"
    if not path.exists():
        compiler = _compiler()
        directory.mkdir(parents=True, exist_ok=True)
        # Made beside its place and moved there: another server that starts now sees all of it or nothing.
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch, path.name)
            _compile([*compiler, *flags, *_inputs(), "-o", str(made), "-lm"])
            made.replace(path)
    return path


def _compiler() -> list[str]:
    if asked := shlex.split(os.environ.get("CC", "")):
        if shutil.which(asked[0]) is None:
            raise ConfigError(f"the C compiler of CC, {asked[0]!r}, is not there", fix="set CC, or unset it")
        return asked
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise ConfigError("there is no C compiler for the CPU's kernels", fix="install gcc or clang, or set CC")


def _inputs() -> list[str]:
    here = Path(__file__).parent
    return [*(str(here / name) for name in SOURCES), "-I", jax.ffi.include_dir()]


def _compile(command: Sequence[str]) -> None:
    fix = "set runtime.attention: xla"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the CPU's kernels cannot be compiled: {error}", fix=fix) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        reason = next((line for line in said if "error" in line), said[0])
        raise ConfigError(f"the CPU's kernels cannot be compiled by {command[0]}: {reason}", fix=fix)


def _fingerprint(flags: Sequence[str]) -> str:
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.[ch]"))]
    parts = [metadata.version("jaxlib"), *flags, platform.machine(), _processor(), *sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What tells one processor's instructions from another's, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
