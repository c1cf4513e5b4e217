"""What an engine process leaves behind, and the directories of those that were killed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.transport.shared_state import Pulse, SharedState
from jaxserve.transport.socket_directory import STATE, SocketDirectory, sweep

WRITER = """
import os, sys
from pathlib import Path
from jaxserve.transport.shared_state import SharedState
state = SharedState(Path(sys.argv[1]))
state.beat(3)
state.count_iterations(4)
for ids in (["a"], [], ["b", "c"]):
    state.write(ids)
os._exit(9)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own have long names
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def test_what_a_process_wrote_outlives_it(folder: Path) -> None:
    directory = SocketDirectory()
    assert directory.state.pulse == Pulse(0, 0) and directory.state.in_work == []
    command = [sys.executable, "-c", WRITER, str(directory.path / STATE)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 9
    assert directory.state.pulse == Pulse(3, 4) and directory.state.in_work == ["b", "c"]
    directory.remove()
    assert not list(folder.iterdir())


def test_a_folder_whose_name_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "long" * 20)
    with pytest.raises(ConfigError, match="64 bytes") as caught:
        SocketDirectory()
    assert "TMPDIR" in (caught.value.fix or "")


def test_more_than_there_is_room_for_is_not_known() -> None:
    state = SharedState()
    state.write(["a"])
    state.write(["x" * 1000] * 2000)
    assert state.in_work == []


def test_a_write_that_is_cut_short_leaves_the_ids_from_before() -> None:
    """At whatever byte: the process may be killed anywhere."""
    state = SharedState()
    state.write(["old"])
    valid = bytes(state._memory)
    state.write(["new", "ids"])
    memory = bytes(state._memory)
    changed = [i for i in range(len(memory)) if memory[i] != valid[i]]
    flag = min(changed)
    for count in range(1, len(changed)):
        torn = SharedState()
        torn._memory[:] = valid
        for i in changed[1 : 1 + count]:  # all but the byte that makes them valid, which comes last
            torn._memory[i] = memory[i]
        assert torn.in_work == ["old"] and flag < 4096


def test_only_directories_of_processes_that_are_gone_are_swept(folder: Path) -> None:
    live, dead, unfinished = SocketDirectory(), SocketDirectory(), SocketDirectory()
    os.close(dead._lock)  # as the end of its process does
    os.close(unfinished._lock)
    (unfinished.path / STATE).rename(unfinished.path / "state.new")
    others = [folder / "jaxserve-abcdefgh", folder / "jaxserve-engine-toolongname", folder / "other"]
    for other in others:
        other.mkdir()
        (other / STATE).write_bytes(b"")
    victim = folder / "victim"
    victim.mkdir()
    (victim / STATE).write_bytes(b"")
    (folder / "jaxserve-engine-linklink").symlink_to(victim)
    linked = folder / "jaxserve-engine-linkfile"
    linked.mkdir()
    (linked / STATE).symlink_to(victim / STATE)
    assert sweep() == [dead.path]
    assert not dead.path.exists() and all(
        path.exists() for path in (live.path, unfinished.path, *others, victim, linked)
    )
    live.remove()
    assert sweep() == []
