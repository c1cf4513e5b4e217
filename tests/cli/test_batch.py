"""`jaxserve batch` against a server whose engine has known tokens; running a file here is held in tests/api/batch."""

import asyncio
import http.server
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from jaxserve.cli import batch as batch_server
from jaxserve.cli.main import main
from jaxserve.client import supervisor
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.errors import EngineDeadError
from jaxserve.types.messages import FromEngine
from tests.api.batch.helpers import input_file, input_line
from tests.api.conftest import LiveServer
from tests.api.fakes import FakeLink
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
        (("status", "../files"), "the server answered 404"),
        (("status", "b", "-o", ""), "is no name of a file"),
        (("run", "none.jsonl", "-o", ""), "is no name of a file"),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("submit", "in.jsonl", "--metadata", "night"), "argument --metadata: should be KEY=VALUE, not 'night'"),
        (("status", "b", "--api-key", "schl\u00fcssel"), "argument --api-key: may hold visible ASCII"),
    ],
)
def test_an_argument_of_another_form_is_named(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["batch", *words])
    assert end.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


class Restarted(http.server.BaseHTTPRequestHandler):
    """A server with one batch, of which some requests meet a connection that ends, or a proxy's 503."""

    fates: ClassVar[list[str]] = []  # of the next requests; the others are answered

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        fate = self.fates.pop(0) if self.fates else "answered"
        if fate == "ended":
            self.close_connection = True
            return
        content = b"line\n"
        if not self.path.endswith("/content"):
            status = "in_progress" if self.fates or fate == "runs" else "completed"
            fields = dict.fromkeys(("errors", "usage", "output_file_id", "error_file_id", "metadata"))
            counts = {"total": 1, "completed": 1, "failed": 0}
            fields |= {"id": "b", "status": status, "request_counts": counts, "output_file_id": "file-1"}
            content = b"[]" if fate == "other" else json.dumps(fields).encode()
        self.send_response(503 if fate == "503" else 200)
        self.send_header("Content-Length", str(len(content) + 1 if fate == "cut" else len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(batch_server, "RETRY_INTERVAL", 0.01)
    monkeypatch.setattr("jaxserve.cli.batch.STATUS_INTERVAL", 0.01)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Restarted)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
    server.server_close()


def test_a_wait_outlives_a_start_of_the_server(
    restarted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Restarted.fates[:] = ["runs", "ended", "503", "runs", "answered", "ended", "cut"]
    target = tmp_path / "out.jsonl"
    assert main(["batch", "status", "b", "--wait", "-o", str(target), "--base-url", restarted]) == 0
    assert target.read_bytes() == b"line\n" and list(tmp_path.iterdir()) == [target]
    told = capsys.readouterr().err
    assert told.count("it is tried again") == 2 and told.count("the server is reached again") == 2


def test_a_server_that_stays_away_ends_the_wait(
    restarted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_server, "RETRY_SECONDS", 0.05)
    Restarted.fates[:] = ["runs", *["503"] * 1000]
    assert main(["batch", "status", "b", "--wait", "--base-url", restarted]) == 2
    assert "follow it later: jaxserve batch status b --wait" in capsys.readouterr().err.splitlines()[-1]


def test_what_is_no_server_of_batches_is_told(restarted: str, capsys: pytest.CaptureFixture[str]) -> None:
    Restarted.fates[:] = ["other"]
    assert main(["batch", "status", "b", "--base-url", restarted]) == 2
    assert "is no such server" in capsys.readouterr().err


class DyingLink(FakeLink):
    """Dies with the first request, and no other engine can be started."""

    async def start(self) -> None:
        if self.seen:
            raise OSError("no more processes")
        await super().start()

    async def receive(self) -> FromEngine:
        message = asyncio.ensure_future(super().receive())
        while not message.done():
            if self.seen:
                message.cancel()
                raise EngineDeadError("killed by the test")
            await asyncio.wait({message}, timeout=0.01)
        return message.result()


def test_an_engine_that_stays_dead_ends_a_run(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0,))
    monkeypatch.setattr("jaxserve.cli.batch.AsyncEngine", lambda config: AsyncEngine(config, DyingLink()))
    target = data.with_name("out.jsonl")
    assert main(["batch", "run", str(data), "-o", str(target)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("jaxserve: the engine is dead: ") and "the same call goes on" in last
    assert not target.exists() and target.with_name("out.jsonl.jaxserve").is_dir()
