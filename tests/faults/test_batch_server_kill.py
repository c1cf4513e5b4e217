"""SIGKILL of a whole server, API and engine processes at once, in the middle of a batch on the real engine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

import jaxserve
from tests.conftest import SMALL

SIZES = {name.replace("_", "-"): size for name, size in SMALL.items()}
PLACES = ("France", "Japan", "Italy", "Spain", "Peru", "Egypt", "India")
START_SECONDS = 240.0
BATCH_SECONDS = 600.0


def body(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is the capital of {PLACES[number % len(PLACES)]}? ({number})"}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 4 + number % 13}


def input_file(count: int) -> bytes:
    rows = (
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body(n)} for n in range(count)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@dataclass
class Server:
    """`jaxserve launch` on a store, and a client of it."""

    process: subprocess.Popen[str]
    http: httpx2.Client

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.http.get(f"/batches/{batch_id}").json()

    def kill(self) -> None:
        parent = psutil.Process(self.process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(store: Path, compile_cache: str) -> Iterator[Server]:
    flags = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "jaxserve", "launch", "--port", "0", "--store.path", str(store), *flags]
    command += ["--model", str(store.parent / "model"), "--served-model-name", "demo"]
    environment = os.environ | {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("URL"))
        with httpx2.Client(base_url=url, timeout=60) as http:
            server = Server(process, http)
            try:
                yield server
            finally:
                if process.poll() is None:
                    server.kill()


def start(server: Server, count: int) -> str:
    parts = {"file": ("in.jsonl", input_file(count))}
    file = server.http.post("/files", data={"purpose": "batch"}, files=parts).json()
    new = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return server.http.post("/batches", json=new).json()["id"]


def finish(server: Server, batch_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + BATCH_SECONDS
    while (batch := server.batch(batch_id))["status"] not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    return batch


def texts(server: Server, batch: dict[str, Any]) -> dict[str, str]:
    data = server.http.get(f"/files/{batch['output_file_id']}/content").content
    lines = [json.loads(line) for line in data.splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert len(found) == len(lines) and data.endswith(b"\n")
    return found


def check(tmp_path: Path, compile_cache: str, *, count: int, kills: int) -> None:
    """A batch under `kills` kills has the answers and the counts of one that runs in peace."""
    shutil.copytree(Path(jaxserve.__file__).parent / "assets" / "demo", tmp_path / "model")
    with serving(tmp_path / "calm", compile_cache) as server:
        calm = finish(server, start(server, count))
        expected = texts(server, calm)
    rng, batch_id = random.Random(kills), ""
    for _ in range(kills):
        with serving(tmp_path / "killed", compile_cache) as server:
            batch_id = batch_id or start(server, count)
            time.sleep(rng.uniform(0, 1))
            server.kill()
    with serving(tmp_path / "killed", compile_cache) as server:
        batch = finish(server, batch_id)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
        assert batch["usage"]["output_tokens"] == calm["usage"]["output_tokens"]
        assert texts(server, batch) == expected


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("count", "kills"), [(60, 1), pytest.param(1000, 100, marks=pytest.mark.slow)])
def test_a_server_killed_in_a_batch(tmp_path: Path, compile_cache: str, count: int, kills: int) -> None:
    check(tmp_path, compile_cache, count=count, kills=kills)
