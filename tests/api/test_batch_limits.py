"""Files at and over every limit, uploaded to a server and made into batches; and the memory that this takes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import Config
from tests.api.batch.helpers import input_line
from tests.api.conftest import LiveServer
from tests.waiting import wait_until

MAX_LINE = 2**20
MEMORY = 200 * 2**20

Outcome = tuple[str, int, list[tuple[str, int | None]]]  # status, total, (code, line) of its errors


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    config = Config().replace(server={"max_body_bytes": MAX_LINE})
    with LiveServer(config, store=tmp_path_factory.mktemp("store")) as server:
        server.link.hold.clear()  # no line finishes: what counts here is what is let in
        yield server
        server.call(server.link.hold.set)


def lines(count: int, first: int = 1) -> Iterator[bytes]:
    for number in range(first, first + count):
        yield json.dumps(input_line(number)).encode() + b"\n"


def one_long_line(size: int) -> Iterator[bytes]:
    yield from lines(1)
    start, end = json.dumps(input_line(2, pad="@")).encode().split(b"@")
    yield start
    for _ in range(size // 2**20):
        yield b"x" * 2**20
    yield end + b"\n"
    yield from lines(1, first=3)


def changed(**changes: Any) -> bytes:
    return json.dumps(input_line(2) | changes).encode() + b"\n"


CASES: dict[str, tuple[Callable[[], Iterator[bytes]], Outcome]] = {
    "50,000 lines": (lambda: lines(50_000), ("in_progress", 50_000, [])),
    "50,001 lines": (lambda: lines(50_001), ("failed", 0, [("too_many_tasks", None)])),
    "0 bytes": (lambda: iter(()), ("failed", 0, [("empty_file", None)])),
    "0 lines": (lambda: iter([b"\n \n\r\n"]), ("failed", 0, [("empty_file", None)])),
    "blank lines": (lambda: iter([b"\n", *lines(2), b"\r\n\n", *lines(1, 3), b"\n"]), ("in_progress", 3, [])),
    "a byte-order mark": (lambda: iter([b"\xef\xbb\xbf", *lines(2)]), ("in_progress", 2, [])),
    "CRLF": (lambda: (line.replace(b"\n", b"\r\n") for line in lines(2)), ("in_progress", 2, [])),
    "no last newline": (lambda: iter([b"".join(lines(2)).rstrip()]), ("in_progress", 2, [])),
    "a custom_id twice": (lambda: iter([*lines(2), *lines(1, 2)]), ("failed", 0, [("duplicate_custom_id", 3)])),
    "two models": (
        lambda: iter([*lines(1), changed(body={"model": "org/demo"})]),
        ("failed", 0, [("model_mismatch", 2)]),
    ),
    "two urls": (
        lambda: iter([*lines(1), changed(url="/v1/completions")]),
        ("failed", 0, [("url_mismatch", 2)]),
    ),
    "stream": (
        lambda: iter([*lines(1), changed(body={"model": "demo", "stream": True})]),
        ("failed", 0, [("unsupported_parameter", 2)]),
    ),
    "an unknown model": (
        lambda: iter([changed(body={"model": "gpt-4"})]),
        ("failed", 0, [("model_not_found", 1)]),
    ),
    "bad JSON on the first and the last line": (
        lambda: iter([b"{\n", *lines(49_998), b"nonsense"]),
        ("failed", 0, [("invalid_json_line", 1), ("invalid_json_line", 50_000)]),
    ),
    "a line of 100 MB": (lambda: one_long_line(100 * 2**20), ("failed", 0, [("request_too_large", 2)])),
}


def peak_memory() -> int:
    """The process's largest resident size since `forget_peak`, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


@pytest.mark.parametrize("name", CASES)
def test_limits_and_bad_files(live: LiveServer, tmp_path: Path, name: str) -> None:
    make, expected = CASES[name]
    with open(tmp_path / "in.jsonl", "wb") as file:
        for piece in make():
            file.write(piece)
    idle = forget_peak()
    with open(tmp_path / "in.jsonl", "rb") as file:
        uploaded = live.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", file)}).json()
    body = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = left(live, live.post("/v1/batches", body).json()["id"], "validating")
    found = [(error["code"], error["line"]) for error in (batch["errors"] or {"data": []})["data"]]
    assert (batch["status"], batch["request_counts"]["total"], found) == expected
    if batch["status"] == "in_progress":
        cancel(live, batch["id"])
    assert peak_memory() - idle < MEMORY


def left(live: LiveServer, batch_id: str, status: str) -> Any:
    """The batch once it is no longer in `status`."""

    def found() -> Any:
        batch = live.http.get(f"/v1/batches/{batch_id}").json()
        return batch if batch["status"] != status else None

    return wait_until(found, f"the batch leaves {status}")


def cancel(live: LiveServer, batch_id: str) -> None:
    assert live.post(f"/v1/batches/{batch_id}/cancel", {}).json()["status"] == "cancelling"
    batch = left(live, batch_id, "cancelling")
    counts = batch["request_counts"]
    assert (batch["status"], counts["completed"], counts["failed"]) == ("cancelled", 0, counts["total"])
    assert live.engine.num_live == 0
