"""What the front asks the servers of its models: real sockets, on which a test answers in their place."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jaxserve.api.app import create_app
from jaxserve.api.http.middleware import ADMIN_PATHS, OPEN_PATHS, PAGE_PATHS
from jaxserve.config import Config, ModelEntry
from jaxserve.front.app import create_front, may_be_route
from jaxserve.front.loaded_models import LoadedModels, ModelPlan
from jaxserve.front.model_process import ModelProcess
from tests.api.fakes import fake_engine

Answer = Callable[[], Awaitable[str]]


class ModelServer:
    """The server of one loaded model. answers: by path; another path is a 404"""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.bodies: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        sizes = [line.partition(":")[2] for line in head.splitlines() if line.startswith("content-length:")]
        self.bodies.append(await reader.readexactly(int(sizes[0])) if sizes else b"")
        found = self.answers.get(head.split()[1].partition("?")[0])
        body = "{}" if found is None else await found()
        status = "404 Not Found" if found is None else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()


def says(value: Any) -> Answer:
    async def answer() -> str:
        return value if isinstance(value, str) else json.dumps(value)

    return answer


def run(
    tmp_path: Path,
    servers: dict[str, ModelServer],
    test: Callable[[httpx2.AsyncClient], Awaitable[None]],
    **sections: dict[str, Any],
) -> None:
    """Run a test with a front of these models, all loaded, and of the model `idle`, which is not."""

    async def main() -> None:
        config = Config().replace(**sections)
        plans = [ModelPlan(ModelEntry.model_validate({"name": name}), config, (name,)) for name in (*servers, "idle")]
        loaded_models = LoadedModels(plans, config.models, config.server, tmp_path)
        async with AsyncExitStack() as stack:
            for model in loaded_models.all[:-1]:
                socket = tmp_path / model.plan.name
                server = await asyncio.start_unix_server(servers[model.plan.name].answer, socket)
                await stack.enter_async_context(server)
                model.state, model.process = "loaded", ModelProcess(config, socket)
            app = create_front(loaded_models, config)
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://front") as client:
                await test(client)
            assert loaded_models.all[-1].state == "unloaded"

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("query, status", [("", 200), ("?model=a", 404)])
def test_an_object_is_looked_for_also_by_a_request_with_a_body(tmp_path: Path, query: str, status: int) -> None:
    servers = {"a": ModelServer({}), "b": ModelServer({"/v1/conversations/conv_1": says({"id": "conv_1"})})}
    body = {"metadata": {"topic": "x"}}

    async def test(client: httpx2.AsyncClient) -> None:
        assert (await client.post(f"/v1/conversations/conv_1{query}", json=body)).status_code == status

    run(tmp_path, servers, test)
    assert [json.loads(raw) for raw in servers["a"].bodies] == [body]
    assert [json.loads(raw) for raw in servers["b"].bodies] == [body] * (status == 200)


def test_a_path_that_no_server_has_loads_no_model(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient) -> None:
        for path in ("/favicon.ico", "/healthz", "/v1", "/chat/completions"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")

    run(tmp_path, {}, test)


def test_models_are_listed_as_openai_and_anthropic_list_them(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient) -> None:
        found = (await client.get("/v1/models")).json()
        assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "a", "idle")
        model = (await client.get("/v1/models/idle")).json()
        assert model == found["data"][1] and model["status"]["value"] == "unloaded"
        assert (model["object"], model["type"], model["display_name"]) == ("model", "model", "idle")
        assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]

    run(tmp_path, {"a": ModelServer({})}, test)


def adapted(name: str, *adapters: str) -> Answer:
    entries = [{"id": name, "parent": None}, *({"id": each, "parent": name, "root": f"/{each}"} for each in adapters)]
    return says({"data": entries})


ADMIN = {"authorization": "Bearer root"}


def test_adapters_have_names_and_calls_reach_the_model_that_has_them(tmp_path: Path) -> None:
    answers = {"/v1/completions": says({}), "/v1/load_lora_adapter": says({}), "/unload_lora_adapter": says({})}
    a, b = (ModelServer(answers | {"/v1/models": adapted(name)}) for name in "ab")

    def sent() -> list[int]:
        return [len(list(filter(None, each.bodies))) for each in (a, b)]

    async def test(client: httpx2.AsyncClient) -> None:
        async def post(path: str, **body: Any) -> int:
            return (await client.post(path, json=body, headers=ADMIN)).status_code

        assert await post("/v1/completions", model="sql") == 404
        assert await post("/v1/load_lora_adapter?model=b", lora_name="sql", lora_path="sql") == 200
        b.answers["/v1/models"] = adapted("b", "sql")
        assert [await post("/v1/completions", model=name) for name in ("sql", "b:sql", "a:sql")] == [200, 200, 404]
        models = (await client.get("/v1/models")).json()["data"]
        shown = {each["id"]: (each.get("parent"), each["status"]["value"]) for each in models}
        assert shown == {
            "a": (None, "loaded"),
            "b": (None, "loaded"),
            "sql": ("b", "loaded"),
            "idle": (None, "unloaded"),
        }
        for name, root in (("sql", "/sql"), ("b:sql", "/sql"), ("a:sql", None), ("prose", None)):
            model = (await client.get(f"/v1/models/{name}")).json()
            assert (model.get("id"), model.get("root")) == ((name, root) if root else (None, None))
        assert sent() == [0, 3]
        for path, status in (("/v1/load_lora_adapter?model=a", 409), ("/v1/load_lora_adapter", 200)):
            assert await post(path, lora_name="sql", lora_path="sql", load_inplace=True) == status
        assert await post("/v1/load_lora_adapter?model=a", lora_name="b", lora_path="sql") == 409
        assert await post("/unload_lora_adapter", lora_name="sql") == 200
        b.answers["/v1/models"] = adapted("b")
        assert sent() == [0, 5]
        assert (await client.post("/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 401
        assert await post("/v1/load_lora_adapter?model=a", lora_name="sql", lora_path="sql") == 200
        a.answers["/v1/models"] = adapted("a", "sql")
        assert await post("/v1/completions", model="sql") == 200
        assert sent() == [2, 5]
        assert await post("/v1/load_lora_adapter", lora_name=5) == 200  # the default model's server refuses it

    run(tmp_path, {"a": a, "b": b}, test, lora={"slots": 1}, server={"admin_api_key": "root"})


def test_every_route_of_a_models_server_is_forwarded() -> None:
    app = create_app(fake_engine()[0], Config())
    paths = set(app.openapi()["paths"]) | set(ADMIN_PATHS) | {"/docs", "/redoc", "/openapi.json", "/get_server_info"}
    here = OPEN_PATHS | PAGE_PATHS | {"/metrics"}
    assert [path for path in sorted(paths - here) if not may_be_route(path)] == ["/models"] * ("/models" in paths)


def test_ollamas_lists_have_all_models_and_load_none(tmp_path: Path) -> None:
    def lists(name: str) -> ModelServer:
        model = {"name": name, "size": 5}
        return ModelServer({path: says({"models": [model]}) for path in ("/api/tags", "/api/ps")})

    async def test(client: httpx2.AsyncClient) -> None:
        tags = (await client.get("/api/tags")).json()["models"]
        assert [(model["name"], model.get("size")) for model in tags] == [("a", 5), ("b", 5), ("idle", None)]
        assert [model["name"] for model in (await client.get("/api/ps")).json()["models"]] == ["a", "b"]
        assert (await client.get("/api/version")).json()["version"]

    run(tmp_path, {"a": lists("a"), "b": lists("b")}, test)


def test_the_metrics_of_all_models_are_asked_for_at_once(tmp_path: Path) -> None:
    """Each answers only once both have been asked."""
    both = asyncio.Barrier(2)

    async def metrics() -> str:
        await both.wait()
        return "# TYPE x gauge\nx 1.0\n"

    async def test(client: httpx2.AsyncClient) -> None:
        text = (await client.get("/metrics")).text
        assert 'x{model="a"} 1.0' in text and 'x{model="b"} 1.0' in text

    run(tmp_path, {name: ModelServer({"/metrics": metrics}) for name in "ab"}, test)


@pytest.mark.parametrize(
    ("values", "is_idle"),
    [
        ({}, False),  # it does not answer
        ({"num_requests_running": 0, "num_requests_waiting": 0}, True),  # without a store
        ({"num_requests_running": 0, "num_requests_waiting": 0, "batches_running": 1}, False),
        ({"num_requests_running": 0, "num_requests_waiting": 0, "background_responses_running": 1}, False),
        ({"num_requests_running": 0, "num_requests_waiting": 0, "batches_running": 0, "batches_paused": 1}, True),
        ({"num_requests_running": 1, "num_requests_waiting": 0, "batches_running": 0}, False),
    ],
)
def test_a_model_that_is_unloaded_works_on_nothing(tmp_path: Path, values: dict[str, int], is_idle: bool) -> None:
    """Between two requests a batch has none in the engine, and while its input is checked."""
    text = "".join(f"# TYPE jaxserve:{name} gauge\njaxserve:{name} {value}.0\n" for name, value in values.items())

    async def main() -> None:
        server = ModelServer({"/metrics": says(text)} if values else {})
        async with await asyncio.start_unix_server(server.answer, tmp_path / "a"):
            assert await ModelProcess(Config(), tmp_path / "a").is_idle() is is_idle

    asyncio.run(asyncio.wait_for(main(), 30))
