"""Write what an earlier version of jaxserve stores, as JSON: what was asked over HTTP, and the directory.

git worktree add ../old 102c2ef6        # 0.3.0; a7b14b51 is 0.2.0
cd ../old && PYTHONPATH=. python ../jaxserve/tests/store/earlier/write.py /tmp/store > 0.3.0.json

It runs in the old version's tree, with the old version's server and the fake engine of its tests.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lines(word: str, count: int) -> bytes:
    """Return the input of a batch."""
    found = b""
    for number in range(count):
        body = {"model": "demo", "messages": [{"role": "user", "content": f"{word} {number}"}], "max_tokens": 8}
        line = {"custom_id": f"{word}-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        found += json.dumps(line).encode() + b"\n"
    return found


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def filled(store: Path) -> dict[str, Any]:
    """Fill a store: a batch that is done, one that failed, one that runs; responses, and a conversation."""
    from jaxserve.version import __version__  # noqa: PLC0415  # of the old tree
    from tests.api.conftest import LiveServer  # noqa: PLC0415

    said: dict[str, Any] = {"version": __version__, "responses": []}
    with LiveServer(store=store) as server:

        def post(path: str, **body: Any) -> Any:
            return server.http.post(server.url + path, json=body)

        def get(path: str) -> Any:
            return server.http.get(server.url + path).json()

        def batch(data: bytes) -> str:
            files, purpose = {"file": ("in.jsonl", data)}, {"purpose": "batch"}
            file = server.http.post(server.url + "/v1/files", files=files, data=purpose).json()
            body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            return post("/v1/batches", **body, metadata={"of": __version__}).json()["id"]

        said["done"] = batch(lines("done", 6))
        until(lambda: get(f"/v1/batches/{said['done']}")["status"] == "completed", "a batch")
        said["failed"] = batch(b"not JSON\n")
        until(lambda: get(f"/v1/batches/{said['failed']}")["status"] == "failed", "a bad batch")
        output = get(f"/v1/batches/{said['done']}")["output_file_id"]
        said["results"] = server.http.get(f"{server.url}/v1/files/{output}/content").text
        first = post("/v1/responses", model="demo", input="Remember 7", store=True)
        if first.status_code == 200:  # 0.2.0 has no such route
            second = post("/v1/responses", model="demo", input="And now?", previous_response_id=first.json()["id"])
            item = {"type": "message", "role": "user", "content": "Hello"}
            said["conversation"] = post("/v1/conversations", items=[item]).json()["id"]
            third = post("/v1/responses", model="demo", input="In it", conversation=said["conversation"])
            said["responses"] = [each.json()["id"] for each in (first, second, third)]
        server.link.delay = 30.0
        said["running"] = batch(lines("running", 4))
        until(lambda: get(f"/v1/batches/{said['running']}")["status"] == "in_progress", "it runs")
    return said


def described(store: Path) -> dict[str, Any]:
    """Return the directory as plain data: the database as SQL, the other files as text, a key of 32 bytes in hex."""
    with contextlib.closing(sqlite3.connect(store / "store.db")) as connection:
        dump = "\n".join(connection.iterdump())
        schema = connection.execute("PRAGMA user_version").fetchone()[0]
        [now] = connection.execute("SELECT max(created_at) FROM batches").fetchone()
    skipped = ("store.db", "store.db-wal", "store.db-shm", "lock")
    paths = [path for path in sorted(store.rglob("*")) if path.is_file() and path.name not in skipped]
    files = {str(path.relative_to(store)): path.read_bytes() for path in paths}
    shown = {name: data.hex() if name.endswith("-key") else data.decode() for name, data in files.items()}
    return {"schema": schema, "now": now, "dump": dump, "files": shown}


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    print(json.dumps(filled(directory) | described(directory), indent=1))
