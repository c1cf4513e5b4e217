"""The routes that replace weights, pause and free memory: what they tell the engine, and what they refuse by name."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from jaxserve.api.sglang.protocol import (
    ContinueRequest,
    MemoryRequest,
    PauseRequest,
    ReadWeightsRequest,
    UpdateVersionRequest,
    UpdateWeightsRequest,
)
from jaxserve.api.sglang.weights import checked_directory
from jaxserve.config import Config
from jaxserve.errors import InvalidValueError, ServerError
from jaxserve.transport.socket_directory import PREFIX
from jaxserve.types.calls import (
    FlushCache,
    Pause,
    ReadWeights,
    Resume,
    SetWeightVersion,
    Sleep,
    UpdateFromDirectory,
    UpdateFromFile,
    Wake,
)

from .conftest import LiveServer
from .fakes import CALLS
from .test_limits import HUGE, LISTS, ODD, edges, fields, schema_of

ADMIN = {"authorization": "Bearer root"}
JSON = ADMIN | {"content-type": "application/json"}
BYTES = ADMIN | {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("allowed")
    (root / "step-1").mkdir()
    (root / "step-1" / "model.safetensors").write_bytes(b"x")
    return root


@pytest.fixture(scope="module")
def server(allowed: Path) -> Iterator[LiveServer]:
    section = {"admin_api_key": "root", "weights_directories": [str(allowed)]}
    with LiveServer(Config().replace(server=section)) as server:
        yield server


def called(server: LiveServer, path: str, method: str = "POST", **options: Any) -> Any:
    """The calls that the engine got for a request that succeeds."""
    server.link.calls.clear()
    options.setdefault("headers", JSON)
    answer = server.http.request(method, path, **options)
    assert answer.status_code == 200, answer.text
    return [each.call for each in server.link.calls]


TOLD: list[tuple[str, Any, list[Any]]] = [
    ("/pause_generation", None, [Pause()]),
    ("/pause_generation", {"mode": "in_place"}, [Pause("in_place")]),
    ("/continue_generation", None, [Resume()]),
    ("/continue_generation", {"torch_empty_cache": True}, [Resume()]),
    ("/release_memory_occupation", {}, [Sleep(mode="retract")]),
    ("/release_memory_occupation", {"tags": ["weights"]}, [Sleep(mode="retract", tags=("weights",))]),
    ("/resume_memory_occupation", {"tags": ["kv_cache"]}, [Wake(("kv_cache",))]),
    ("/update_weight_version", {"new_version": "v"}, [SetWeightVersion("v", "abort")]),
    (
        "/update_weight_version",
        {"new_version": "v", "abort_all_requests": False},
        [SetWeightVersion("v")],
    ),
    ("/pause", None, [Pause(), FlushCache()]),
    ("/pause?clear_cache=false", None, [Pause()]),
    ("/pause?mode=keep", None, [Pause("in_place")]),
    ("/get_weights_by_name", {"name": "w"}, [ReadWeights("w", 100)]),
    ("/get_weights_by_name", {"name": "w", "truncate_size": 2}, [ReadWeights("w", 2)]),
    ("/resume", None, [Resume()]),
    ("/sleep", None, [Sleep()]),
    ("/sleep?level=2&mode=keep", None, [Sleep(2, "retract")]),
    ("/sleep?level=0", None, [Pause()]),
    ("/wake_up", None, [Wake(), Resume()]),
    ("/wake_up?tags=weights", None, [Wake(("weights",))]),
    ("/reset_prefix_cache", None, [FlushCache()]),
]


@pytest.mark.parametrize(("path", "body", "calls"), TOLD)
def test_what_the_engine_is_told(server: LiveServer, path: str, body: Any, calls: list[Any]) -> None:
    options = {} if body is None else {"json": body}
    assert called(server, path, **options) == calls


@pytest.mark.parametrize("path", ["/pause?mode=wait&clear_cache=false", "/sleep?level=0&mode=wait"])
def test_a_pause_that_waits(server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    assert called(server, path) == [Pause("retract")]

    async def given_up(*_: Any) -> bool:
        return False

    monkeypatch.setattr("jaxserve.client.finishing.FinishingPause.finish", given_up)
    refused = server.http.post(path, headers=ADMIN)
    assert refused.status_code == 409 and "given up" in refused.json()["error"]["message"]


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_sleep_that_waits_leaves_no_pause(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, was_paused: bool
) -> None:
    """Whether the engine can sleep or not."""
    answers = CALLS | {"state": {"paused": was_paused, "asleep": []}}
    monkeypatch.setattr("tests.api.fakes.CALLS", answers)
    told = ["state", "pause", "sleep", *([] if was_paused else ["resume"])]
    assert [call.name for call in called(server, "/sleep?mode=wait")] == told
    answers["sleep"] = ServerError("no memory")
    server.link.calls.clear()
    refused = server.http.post("/sleep?mode=wait", headers=ADMIN)
    assert refused.status_code == 500 and [each.call.name for each in server.link.calls] == told


def test_states(server: LiveServer) -> None:
    assert server.http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False, "asleep": []}
    assert server.http.get("/is_paused", headers=ADMIN).json() == {"is_paused": False}
    assert server.http.get("/model_info").json()["weight_version"] == "default"


def test_from_a_directory(server: LiveServer, allowed: Path) -> None:
    path = str(allowed / "step-1")
    expected = UpdateFromDirectory(path=os.path.realpath(path))
    for body in ({"model_path": path}, {"model_path": "step-1", "flush_cache": True, "load_format": "auto"}):
        [call] = called(server, "/update_weights_from_disk", json=body)
        number = call.number  # another one each time
        assert call.version.isdigit() and msgspec.structs.replace(call, number=0, version=None) == expected
    body = {"model_path": path, "weight_version": "7", "abort_all_requests": True, "token_step": 0, "is_async": False}
    [call] = called(server, "/update_weights_from_disk", json=body)
    assert call == msgspec.structs.replace(expected, version="7", running="abort", number=number + 1)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "..",
            "../..",
            "/etc",
            "step-1/../..",
            "step-2",
            "step-1/model.safetensors",
            "out",
            "shards",
            "block",
            "\0",
        ),
        *("a" * 4000, "~", "file:///etc", "step-1\n", " "),
    ],
)
def test_no_other_directory(server: LiveServer, allowed: Path, path: str) -> None:
    """Neither by its name nor by a link; and the message does not tell what there is."""
    links = {"out": "/usr", "shards/model.safetensors": "/etc/hostname", "block/model.gguf": "/etc/hostname"}
    for name, target in links.items():
        (allowed / name).parent.mkdir(exist_ok=True)
        if not (allowed / name).is_symlink():
            (allowed / name).symlink_to(target)
    server.link.calls.clear()
    answer = server.http.post("/update_weights_from_disk", json={"model_path": path}, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], server.link.calls) == (400, "model_path", [])
    assert error["message"] == "model_path is outside server.weights_directories"


def test_nothing_is_allowed_without_a_configuration(allowed: Path) -> None:
    with pytest.raises(InvalidValueError):
        checked_directory(str(allowed / "step-1"), [])
    assert checked_directory("step-1", [Path("/nowhere"), allowed]) == Path(os.path.realpath(allowed / "step-1"))


MODELS: dict[str, tuple[type[BaseModel], str]] = {
    "/update_weights_from_disk": (UpdateWeightsRequest, '"model_path": "step-1"'),
    "/update_weight_version": (UpdateVersionRequest, '"new_version": "v"'),
    "/get_weights_by_name": (ReadWeightsRequest, '"name": "w"'),
    "/pause_generation": (PauseRequest, ""),
    "/continue_generation": (ContinueRequest, ""),
    "/release_memory_occupation": (MemoryRequest, ""),
    "/resume_memory_occupation": (MemoryRequest, ""),
}
CASES = [(path, model, name) for path, (model, _) in MODELS.items() for name in fields(model)]


@pytest.mark.parametrize(("path", "model", "name"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_at_and_over_its_limits(server: LiveServer, path: str, model: type[BaseModel], name: str) -> None:
    needed, statuses = MODELS[path][1], set()
    for value in dict.fromkeys([*edges(schema_of(model, name)), *ODD, *HUGE, *LISTS]):
        others = "" if f'"{name}"' in needed or not needed else f", {needed}"
        raw = f'{{"{name}": {value}{others}}}'.encode()
        answer = server.http.post(path, content=raw, headers=JSON)
        statuses.add(answer.status_code)
        if answer.status_code >= 400:
            assert name in json.dumps(answer.json()["error"]), (value[:60], answer.text)
    assert 400 in statuses and statuses <= {200, 400}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/update_weights_from_disk", "flush_cache=false"),
        ("/update_weights_from_disk", "keep_pause=true"),
        ("/update_weights_from_disk", "is_async=true"),
        ("/update_weights_from_disk", "token_step=3"),
        ("/update_weights_from_disk", 'manifest={"a":1}'),
        ("/update_weights_from_disk", 'load_format="dummy"'),
        ("/pause_generation", 'mode="wait"'),
        ("/release_memory_occupation", 'tags=["cuda_graph"]'),
    ],
)
def test_what_is_not_done_is_refused_by_name(server: LiveServer, path: str, name: str) -> None:
    name, _, value = name.partition("=")
    body = {name: json.loads(value)} | ({"model_path": "step-1"} if "disk" in path else {})
    answer = server.http.post(path, json=body, headers=JSON)
    assert answer.status_code == 400 and name in answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=x", "level"),
        ("/sleep?mode=later", "mode"),
        ("/pause?mode=later", "mode"),
        ("/pause?wait_for_inflight_requests=true", "wait_for_inflight_requests"),
        ("/wake_up?tags=all", "tags"),
        ("/wake_up?tag=weights", "tag"),
        ("/resume?now=1", "now"),
        ("/update_weights_from_tensor?flush_cache=false", "flush_cache"),
        ("/update_weights_from_tensor?partial=maybe", "partial"),
        ("/update_weights_from_tensor?weight_version=", "weight_version"),
        ("/update_weights_from_tensor?load_format=flattened_bucket", "load_format"),
    ],
)
def test_a_query_that_is_not_done_is_refused_by_name(server: LiveServer, path: str, name: str) -> None:
    answer = server.http.post(path, content=b"x", headers=BYTES)
    assert answer.status_code == 400 and name in answer.json()["error"]["param"], answer.text


# --- weights in the body


def uploads() -> list[Path]:
    """The private directories that hold an upload now."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if (path / "model.safetensors").exists()]


def test_weights_in_the_body(server: LiveServer) -> None:
    query = "?weight_version=9&abort_all_requests=true&partial=true"
    [call] = called(server, f"/update_weights_from_tensor{query}", headers=BYTES, content=b"tensors")
    assert isinstance(call, UpdateFromFile) and not Path(call.path).parent.exists()
    assert call.number and (call.version, call.running, call.partial) == ("9", "abort", True)
    assert uploads() == []


def test_a_body_that_is_no_file_is_refused(server: LiveServer) -> None:
    server.link.calls.clear()
    pickled = {"serialized_named_tensors": ["gASV"], "flush_cache": True}
    answer = server.http.post("/update_weights_from_tensor", json=pickled, headers=JSON)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "serialized_named_tensors"
    assert server.http.post("/update_weights_from_tensor", content=b"", headers=BYTES).status_code == 400
    assert server.http.post("/update_weights_from_tensor", content=b"x").status_code == 401
    assert server.link.calls == [] and uploads() == []


def test_a_body_that_is_too_large_is_refused(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once if it announces its length, else as soon as it is too long."""
    monkeypatch.setattr("jaxserve.api.sglang.weights.MAX_HEADER", 1000)
    monkeypatch.setattr("jaxserve.api.sglang.weights.WIDEST", 0)
    parts = (b"x" * 600 for _ in range(4))
    for content in (b"x" * 1001, parts):
        answer = server.http.post("/update_weights_from_tensor", content=content, headers=BYTES)
        assert answer.status_code == 413, answer.text
    assert called(server, "/update_weights_from_tensor", headers=BYTES, content=b"x" * 1000)
    assert uploads() == []


def test_a_client_that_leaves_in_the_middle_of_its_body(server: LiveServer) -> None:
    server.link.calls.clear()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        head = "POST /update_weights_from_tensor HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer root\r\n"
        connection.sendall(f"{head}content-length: 100000\r\n\r\n".encode() + b"x" * 5000)
        server.wait(lambda: len(uploads()) == 1, "the upload has begun")
    server.wait(lambda: not uploads(), "what had come is removed")
    assert server.link.calls == []
