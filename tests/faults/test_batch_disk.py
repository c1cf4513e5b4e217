"""A server whose store's disk is really full: what it refuses, what it waits for, and who does not notice."""

import json
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.batch.helpers import input_file
from tests.api.conftest import LiveServer
from tests.scrape import values

SIZE = 3 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "store"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(b"x" * SIZE)
    return ballast


def upload(live: LiveServer, data: bytes) -> Any:
    return live.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})


def get(live: LiveServer, path: str) -> Any:
    answer = live.http.get(path)
    assert answer.status_code == 200
    return answer.json()


def until(live: LiveServer, path: str, condition: Callable[[Any], bool]) -> Any:
    """What a route answers once a condition holds of it."""
    deadline = time.monotonic() + 120
    while not condition(answer := get(live, path)):
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    return answer


def test_a_full_disk(disk: Path, tmp_path: Path) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    with LiveServer(store=disk) as live:
        live.link.delay = 0.002
        file = upload(live, input_file(300)).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch_id = live.post("/v1/batches", body).json()["id"]
        batch_path = f"/v1/batches/{batch_id}"
        until(live, batch_path, lambda batch: batch["request_counts"]["completed"] >= 20)

        live.call(live.link.hold.clear)  # lines wait in the engine, whatever its speed, until the disk is full
        ballast = fill(disk)
        live.call(live.link.hold.set)
        refused = upload(live, b"x" * 2**20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "insufficient_storage")
        assert [each["id"] for each in get(live, "/v1/files")["data"]] == [file["id"]]
        paused = until(live, batch_path, lambda batch: batch["errors"])
        assert [error["code"] for error in paused["errors"]["data"]] == ["waiting_for_storage"]
        assert paused["status"] == "in_progress" and paused["request_counts"]["failed"] == 0
        assert get(live, "/v1/batches")["data"] == [paused]
        until(live, "/health", lambda health: health["store"]["status"] == "full")
        metrics = values(live.http.get("/metrics").text)
        assert metrics["jaxserve:store_writable"] == 0 and metrics["jaxserve:batches_paused"] == 1
        assert live.post("/v1/chat/completions", chat).status_code == 200  # online requests do not notice
        assert get(live, batch_path) == paused

        ballast.unlink()
        batch = until(live, batch_path, lambda batch: batch["status"] == "completed")
        assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
        assert batch["errors"] is None
        assert get(live, "/health")["store"] == {"status": "ok", "detail": None}
        output = live.http.get(f"/v1/files/{batch['output_file_id']}/content").content
        assert len({json.loads(line)["custom_id"] for line in output.splitlines()}) == 300
    connection = sqlite3.connect(disk / "store.db")
    assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    connection.close()


def test_lines_that_finish_one_by_one_fit_a_small_disk(disk: Path) -> None:
    """As on a slow machine: every line is a commit of its own, 12 KiB of the database's log each."""
    with LiveServer(store=disk) as live:
        live.call(lambda: setattr(live.app.state.batches.window, "_limit", lambda lines: 1))
        file = upload(live, input_file(400)).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch_id = live.post("/v1/batches", body).json()["id"]
        batch = until(live, f"/v1/batches/{batch_id}", lambda batch: batch["status"] == "completed")
        assert batch["request_counts"]["completed"] == 400
