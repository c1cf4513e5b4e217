"""The directory of compiled programs: whole entries for everybody, whatever happens to the process that writes them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import contextlib
import sys
from pathlib import Path
import jax
from jax import monitoring
from jaxserve.runtime.compilation import program_cache
from jaxserve.runtime.compilation.compiler import Program, compile_all

hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event))
program_cache.enable(Path(sys.argv[1]))
shape = jax.ShapeDtypeStruct((8,), jax.numpy.float32)
with program_cache.unused() if "unused" in sys.argv else contextlib.nullcontext():
    compile_all([Program(f"p{i}", lambda x, i=i: x * i + 3, (shape,)) for i in range(3)])
print(hits.count("/jax/compilation_cache/cache_hits"), flush=True)
if "stay" in sys.argv:
    sys.stdin.read()
"""


def start(cache: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", COMPILE, str(cache), *flags]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hits(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return int(output)


def own(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()]


def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    assert hits(start(cache)) == 0
    assert len(list(cache.glob("*-cache"))) == 3
    assert hits(start(cache)) == 3
    assert hits(start(cache, "unused")) == 0


def test_what_a_process_writes_is_nobody_elses_until_it_is_whole(tmp_path: Path) -> None:
    """An entry that is half written, by a process that lives or was killed, is read by no other process."""
    first = start(tmp_path, "stay")
    assert first.stdout is not None and first.stdout.readline() == "0\n"
    (directory,) = own(tmp_path)
    entries = sorted((tmp_path / directory).glob("*-cache"))
    for entry in entries:
        (tmp_path / entry.name).unlink()  # as before the first process shared them
        whole = entry.read_bytes()
        entry.unlink()
        entry.write_bytes(whole[: len(whole) // 2])
    assert hits(start(tmp_path)) == 0  # with warnings as errors
    assert directory in own(tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert hits(start(tmp_path)) == 3
    assert directory not in own(tmp_path)  # what a killed process leaves is removed by the next one


def test_an_entry_that_a_full_disk_cut_off_is_not_shared(tmp_path: Path) -> None:
    cut = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
    first = [sys.executable, "-c", COMPILE.replace("shape = ", cut + "shape = ", 1), str(tmp_path)]
    assert subprocess.run(first, capture_output=True, text=True, check=True, timeout=120).stdout == "0\n"
    assert not list(tmp_path.glob("*-cache"))
    assert hits(start(tmp_path)) == 0
    assert hits(start(tmp_path)) == 3


def test_a_directory_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    assert hits(start(tmp_path)) == 0
    refuse = "import tempfile\ndef mkdtemp(**keys): raise PermissionError(13, 'Permission denied')\n"
    command = [sys.executable, "-c", refuse + "tempfile.mkdtemp = mkdtemp\n" + COMPILE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "3\n" and "are not kept" in done.stderr


def test_a_users_limit_on_the_cache_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "100000000")
    assert [hits(start(tmp_path)) for _ in range(2)] == [0, 3]


def test_without_hard_links_entries_are_copied(tmp_path: Path) -> None:
    refuse = "import os\ndef link(*paths): raise PermissionError\nos.link = link\n"
    command = [sys.executable, "-W", "error", "-c", refuse + COMPILE, str(tmp_path)]
    for expected in ("0\n", "3\n"):
        assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout == expected
    assert not list(tmp_path.glob(".*"))
