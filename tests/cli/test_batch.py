"""`jaxserve batch` against a server whose engine has known tokens; running a file here is held in tests/api/batch."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from tests.api.batch.helpers import input_file, input_line
from tests.api.conftest import LiveServer
from tests.store.disks import FailingDisk


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(store=tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_bytes(input_file(20) + json.dumps(input_line(21, temperature=9)).encode())
    return tmp_path / "in.jsonl"


def batch(live: LiveServer, *words: str) -> int:
    return main(["batch", *words, "--base-url", live.url])


def test_submit_and_wait(live: LiveServer, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = data.with_name("out.jsonl")
    assert batch(live, "submit", str(data), "--metadata", "night=1", "-o", str(target)) == 1  # a line fails
    shown = capsys.readouterr().out
    assert shown.startswith("batch_") and "completed" in shown and '{"night": "1"}' in shown
    assert len(target.read_bytes().splitlines()) == 20
    assert len(target.with_name("out.errors.jsonl").read_bytes().splitlines()) == 1


def test_submit_status_cancel(live: LiveServer, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live.link.delay = 0.05
    assert batch(live, "submit", str(data)) == 0
    batch_id = capsys.readouterr().out.strip()
    assert main(["batch", "status", batch_id, "--base-url", f"{live.url}/v1/"]) == 0  # as clients want it
    assert batch_id in capsys.readouterr().out
    assert batch(live, "cancel", batch_id) == 0
    assert capsys.readouterr().out == "cancelling\n"
    assert batch(live, "status", batch_id, "--wait") == 1
    assert "cancelled" in capsys.readouterr().out
    live.link.delay = 0.0


def test_a_wait_for_the_disk_is_shown(tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    disk = FailingDisk()
    with LiveServer(store=tmp_path / "store", disk=disk) as live:
        live.call(live.link.hold.clear)
        assert batch(live, "submit", str(data)) == 0
        batch_id = capfd.readouterr().out.strip()
        live.wait(lambda: live.engine.num_live > 0, "the batch runs")
        disk.failing = {"commit"}
        live.call(live.link.hold.set)
        live.wait(lambda: live.app.state.batches.pause_of(batch_id) is not None, "the batch does not pause")
        shown: list[str] = []

        def repair() -> None:
            while "can be written.\n" not in "".join(shown):
                time.sleep(0.05)
                shown.append(capfd.readouterr().err)
            disk.failing = set()

        with ThreadPoolExecutor(1) as pool:  # the command itself needs the main thread
            repaired = pool.submit(repair)
            assert batch(live, "status", batch_id, "--wait") == 1  # a line fails
            repaired.result()
        assert "jaxserve: The server's disk is full. The batch goes on once it can be written.\n" in "".join(shown)
        assert "disk" not in capfd.readouterr().out


def test_a_bad_file_is_explained(live: LiveServer, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.write_bytes(b"{\n" * 3)
    assert batch(live, "submit", str(data), "--wait") == 1
    assert "line 1: invalid_json_line" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("status", "batch_none"), "the server answered 404: No batch found"),
        (("status", "batch_none", "--base-url", "http://127.0.0.1:1"), "cannot reach http://127.0.0.1:1"),
        (("status", "batch_none", "--frobnicate"), "unknown argument --frobnicate"),
        (("submit", "none.jsonl"), "there is no file none.jsonl"),
        (("status", "b", "-o", "none/x.jsonl"), "there is no directory none"),
        (("status", "b", "--base-url", "http://[::1"), "cannot reach http://[::1"),
        (("run", "none.jsonl", "-o", "x.jsonl"), "there is no file none.jsonl"),
        (("run", "none.jsonl", "-o", "x.jsonl", "--scheduler.max-nums", "3"), "unknown"),
    ],
)
def test_mistakes_are_one_line(
    live: LiveServer, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--base-url",) if "--base-url" not in words and words[0] != "run" else ()
    assert main(["batch", *words, *(part for flag in given for part in (flag, live.url))]) == 2
    stderr = capsys.readouterr().err.strip()
    assert message in stderr and len(stderr.splitlines()) == 1


def test_an_output_that_cannot_be_written_is_one_line(
    live: LiveServer, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data.parent / "folder.jsonl").mkdir()
    assert batch(live, "submit", str(data), "-o", str(data.parent / "folder.jsonl")) == 2
    shown = capsys.readouterr().err.strip()
    assert "cannot write" in shown and len(shown.splitlines()) == 1
    assert not (data.parent / "folder.jsonl.part").exists()


def test_an_unfit_file_needs_no_engine(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.write_bytes(b"{\n")
    assert main(["batch", "run", str(data), "-o", str(data.with_name("out.jsonl"))]) == 1
    assert "line 1: invalid_json_line" in capsys.readouterr().err
    assert not data.with_name("out.jsonl.jaxserve").exists()
