"""Adapters over HTTP: the routes that load and unload them, and what a request that names one sends to the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxserve.api.app import create_app
from jaxserve.api.sglang.adapters import kept_adapters
from jaxserve.client.control import ControlRecord
from jaxserve.config import Config
from jaxserve.errors import ConfigError, ModelNotFoundError
from jaxserve.types.calls import LoadAdapter, UnloadAdapter
from jaxserve.types.messages import AdapterStatus, EngineStats, Outputs

from .conftest import LiveServer, serving
from .fakes import fake_engine
from .test_weights import ADMIN, called

ADAPTERS = [
    AdapterStatus(name="sql", digest="1" * 32, rank=8, version=2, path="/adapters/sql", num_running=1),
    AdapterStatus(name="org/poet", digest="2" * 32, rank=4, version=1, num_waiting=3),
]


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("allowed")
    (root / "sql").mkdir()
    (root / "sql" / "adapter_config.json").write_text("{}")
    (root / "escapes").mkdir()
    (root / "escapes" / "adapter_config.json").symlink_to("/etc/passwd")
    return root


@pytest.fixture(scope="module")
def server(allowed: Path) -> Iterator[LiveServer]:
    section = {"admin_api_key": "root", "weights_directories": [str(allowed)]}
    with LiveServer(Config().replace(server=section)) as server:
        server.link.adapters = ADAPTERS
        server.call(lambda: server.link.say(Outputs([], EngineStats(adapters=ADAPTERS))))
        server.wait(lambda: len(server.engine.stats().adapters) == 2, "the adapters are not known")
        yield server


def test_the_routes_of_vllm_and_sglang(server: LiveServer, allowed: Path) -> None:
    path = str(allowed / "sql")
    for route, body, call in (
        ("/v1/load_lora_adapter", {"lora_path": "sql"}, LoadAdapter("sql", path)),
        ("/v1/load_lora_adapter", {"lora_path": path, "load_inplace": True}, LoadAdapter("sql", path, replace=True)),
        ("/v1/unload_lora_adapter", {"lora_int_id": 3}, UnloadAdapter("sql")),
        ("/load_lora_adapter", {"lora_path": path, "pinned": True}, LoadAdapter("sql", path, pinned=True)),
        ("/unload_lora_adapter", {}, UnloadAdapter("sql")),
    ):
        assert called(server, route, json={"lora_name": "sql"} | body) == [call]
    answer = server.post("/load_lora_adapter", {"lora_name": "sql", "lora_path": path}, headers=ADMIN).json()
    assert answer["success"] and answer["loaded_adapters"] == {"sql": "/adapters/sql", "org/poet": ""}
    text = server.post("/v1/unload_lora_adapter", {"lora_name": "sql"}, headers=ADMIN).text
    assert text == "Success: LoRA adapter 'sql' removed successfully."


@pytest.mark.parametrize("path", ["/etc", "..", "missing", "sql/../..", "escapes", "a\0b"])
def test_directories_outside_of_the_allowed_ones(server: LiveServer, path: str) -> None:
    server.link.calls.clear()
    for route in ("/v1/load_lora_adapter", "/load_lora_adapter"):
        answer = server.post(route, {"lora_name": "x", "lora_path": path}, headers=ADMIN)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "lora_path"
        assert server.post(route, {"lora_name": "x", "lora_path": path}).status_code in (401, 403)
    assert not server.link.calls
    assert (
        server.post("/load_lora_adapter", {"lora_name": "demo", "lora_path": "sql"}, headers=ADMIN).status_code == 400
    )


def test_adapters_are_models(server: LiveServer) -> None:
    models = server.http.get("/v1/models").json()["data"]
    shown = {each["id"]: (each["root"], each["parent"]) for each in models}
    assert shown == {
        "demo": ("demo-path", None),
        "org/demo": ("demo-path", None),
        "sql": ("/adapters/sql", "demo"),
        "org/poet": ("org/poet", "demo"),
    }
    assert server.http.get("/v1/models/demo:sql").json()["parent"] == "demo"
    assert server.http.get("/v1/models/prose").status_code == 404
    assert {each["name"] for each in server.http.get("/api/tags").json()["models"]} == set(shown)


MESSAGES = [{"role": "user", "content": "hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_family_of_routes_sends_the_adapter(server: LiveServer, route: str) -> None:
    for name, digest in (("sql", "1" * 32), ("demo:sql", "1" * 32), ("org/demo:org/poet", "2" * 32), ("demo", "")):
        server.link.seen.clear()
        answer = server.post(route, ROUTES[route] | {"model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        (request,) = server.link.seen
        assert request.adapter == digest
        assert request.namespace == (f"{digest}\0" if digest else "")
    for name in ("prose", "demo:prose", "sql:demo", "poet"):
        assert server.post(route, ROUTES[route] | {"model": name}).status_code == 404


def test_generate_names_the_adapter_as_sglang_does(server: LiveServer) -> None:
    for path, digest in (("sql", "1" * 32), (["org/poet", "org/poet"], "2" * 32), ([None, None], ""), (None, "")):
        server.link.seen.clear()
        text = ["hello", "hello"] if isinstance(path, list) else "hello"
        answer = server.post("/generate", {"text": text, "lora_path": path})
        assert answer.status_code == 200, answer.text
        assert {(each.adapter, each.namespace) for each in server.link.seen} == {(digest, digest and f"{digest}\0")}
    assert server.post("/generate", {"text": "hello", "lora_path": "prose"}).status_code == 404
    two = server.post("/generate", {"text": ["a", "b"], "lora_path": ["sql", None]})
    assert two.status_code == 400 and two.json()["error"]["param"] == "lora_path"


@pytest.mark.parametrize(
    ("route", "body", "info"),
    [
        ("/v1/embeddings", {"input": "hello"}, {"is_embedding": True}),
        ("/v1/rerank", {"query": "hello", "documents": ["one"]}, {"is_embedding": True}),
        ("/v1/score", {"text_1": "hello", "text_2": "one"}, {"is_embedding": True}),
        ("/v1/classify", {"input": "hello"}, {"labels": ["LABEL_0"]}),
    ],
)
def test_routes_of_numbers_send_the_adapter(server: LiveServer, route: str, body: Any, info: dict[str, Any]) -> None:
    with serving(server, **info):
        for name, digest in (("sql", "1" * 32), ("demo", "")):
            server.link.seen.clear()
            answer = server.post(route, body | {"model": name})
            assert answer.status_code == 200, answer.text
            assert {request.adapter for request in server.link.seen} == {digest}


def test_an_adapter_that_is_gone_is_not_the_model(server: LiveServer) -> None:
    """Between the check of its name and its use, a request's adapter may be unloaded."""
    state = server.app.state.server
    assert (state.adapter_digest("sql"), state.adapter_digest("demo")) == ("1" * 32, "")
    with pytest.raises(ModelNotFoundError, match="prose"):
        state.adapter_digest("prose")


def test_a_salt_stays_within_the_adapter(server: LiveServer) -> None:
    server.link.seen.clear()
    for model in ("sql", "demo"):
        server.post("/v1/completions", {"model": model, "prompt": "hello", "cache_salt": "s"})
    assert [each.namespace for each in server.link.seen] == [f"{'1' * 32}\0:s", ":s"]


def test_metrics_name_the_adapters(server: LiveServer) -> None:
    with serving(server, lora_slots=4):
        text = server.http.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    for label in ('max_lora="4"', 'running_lora_adapters="sql"', 'waiting_lora_adapters="org/poet"'):
        assert label in line
    assert 'jaxserve:adapter_requests_waiting{adapter="org/poet",engine="0",model_name="demo"} 3.0' in text
    assert "vllm:lora_requests_info" not in server.http.get("/metrics").text


def test_the_store_keeps_what_routes_have_loaded(
    allowed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"server": {"admin_api_key": "root", "weights_directories": [str(allowed)]}, "lora": {"slots": 1}}
    config = Config().replace(**keys)
    for kept, keep in (([], False), (["sql"], True), (["sql"], False)):
        with LiveServer(config.replace(lora={"keep": keep}), store=tmp_path / "store") as server:
            state = server.app.state.server
            body = {"lora_name": "sql", "lora_path": "sql"}
            assert server.post("/load_lora_adapter", body, headers=ADMIN).status_code == 200
            bodies = server.run(state.store.kept_adapters())
            assert [msgspec.json.decode(each)["name"] for each in bodies] == kept
            assert [each.digest for each in server.run(kept_adapters(state))] == ["1" * 32] * keep
    gone = AdapterStatus(name="gone", digest="2" * 32, rank=4, version=1, path=str(allowed / "gone"))
    with LiveServer(config.replace(lora={"keep": True}), store=tmp_path / "store") as server:
        state = server.app.state.server
        server.run(state.store.keep_adapter("gone", msgspec.json.encode(gone)))
        assert [each.name for each in server.run(kept_adapters(state))] == ["sql"]
        assert "the adapter 'gone' is not loaded again: lora_path is outside server.weights_directories" in caplog.text
        for name, missing_ok in (("sql", True), ("gone", True), ("gone", False)):
            calls = called(server, "/unload_lora_adapter", json={"lora_name": name})
            assert calls == [UnloadAdapter(name, missing_ok=missing_ok)]
        assert server.run(state.store.kept_adapters()) == []


def test_keeping_needs_a_store() -> None:
    config = Config.of(slots=1, keep=True)
    with pytest.raises(ConfigError, match=r"lora\.keep needs a store"):
        create_app(fake_engine(config)[0], config)


def test_calls_that_a_new_engine_gets_again() -> None:
    record = ControlRecord()
    for call in (
        LoadAdapter("a", "/a"),
        LoadAdapter("b", "/b"),
        LoadAdapter("a", "/a2", replace=True, pinned=True),
        UnloadAdapter("b"),
    ):
        record.record(call, None)
    again = [LoadAdapter("a", "/a2", replace=True, pinned=True), UnloadAdapter("b", missing_ok=True)]
    assert record.calls() == again
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(again[0]), type=LoadAdapter) == again[0]
