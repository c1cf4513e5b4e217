"""A server whose store's disk is really full: what it refuses, what it waits for, and who does not notice."""

import json
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.batch.helpers import input_file
from tests.api.conftest import LiveServer

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


def wait_for(live: LiveServer, batch_id: str, completed: int) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while (batch := get(live, f"/v1/batches/{batch_id}"))["request_counts"]["completed"] < completed:
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def test_a_full_disk(disk: Path, tmp_path: Path) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    with LiveServer(store=disk) as live:
        live.link.delay = 0.002
        file = upload(live, input_file(300)).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch_id = live.post("/v1/batches", body).json()["id"]
        wait_for(live, batch_id, 20)

        ballast = fill(disk)
        refused = upload(live, b"x" * 2**20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "insufficient_storage")
        assert [each["id"] for each in get(live, "/v1/files")["data"]] == [file["id"]]
        time.sleep(1)
        paused = get(live, f"/v1/batches/{batch_id}")
        assert live.post("/v1/chat/completions", chat).status_code == 200  # online requests do not notice
        time.sleep(0.5)
        assert get(live, f"/v1/batches/{batch_id}") == paused
        assert paused["status"] == "in_progress" and paused["request_counts"]["failed"] == 0

        ballast.unlink()
        batch = wait_for(live, batch_id, 300)
        while batch["status"] != "completed":
            batch = get(live, f"/v1/batches/{batch_id}")
        assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
        output = live.http.get(f"/v1/files/{batch['output_file_id']}/content").content
        assert len({json.loads(line)["custom_id"] for line in output.splitlines()}) == 300
    connection = sqlite3.connect(disk / "store.db")
    assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    connection.close()
