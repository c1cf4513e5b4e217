"""Around the routes: readiness, keys, limits, disconnects, metrics, and what the server says it is."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from jaxserve.api.http.middleware import GENERATING_PATHS
from jaxserve.config import Config
from jaxserve.errors import EngineDeadError
from jaxserve.types.messages import EngineStats, Outputs
from tests.scrape import values

from .conftest import LiveServer, reply_with

TEXT: dict[str, Any] = {"model": "demo", "prompt": "Hi"}


def test_models(client: Any) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["demo", "org/demo"]
    assert client.models.retrieve("org/demo").id == "org/demo"
    assert models[0].max_model_len == 512
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("missing")
    assert caught.value.code == "model_not_found"


def test_before_the_engine_is_ready() -> None:
    with LiveServer(ready=False) as server:
        assert server.http.get("/live").status_code == server.http.head("/").status_code == 200
        assert server.http.get("/metrics").status_code == 200
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "loading"
        for response in (server.post("/v1/completions", TEXT), server.http.get("/v1/models")):
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "not_ready"
        server.call(server.link.become_ready)
        server.wait(lambda: server.engine.status.phase == "ready", "never ready")
        health = server.http.get("/health").json()
        assert health["status"] == "ready" and "programs" not in health
        stats = EngineStats(details={"programs_ready": 11.0, "programs_total": 27.0})
        server.call(lambda: server.link.say(Outputs([], stats)))
        server.wait(lambda: bool(server.engine.stats().details), "no statistics")
        assert server.http.get("/health").json()["programs"] == {"ready": 11, "total": 27}
        assert server.post("/v1/completions", TEXT).status_code == 200
        server.call(server.engine.drain)
        assert server.post("/v1/completions", TEXT).status_code == 503
        assert server.http.get("/health").status_code == 503


def test_keys() -> None:
    config = Config().replace(server={"api_key": "open-sesame", "admin_api_key": "root"})
    with LiveServer(config) as server:
        for path in ("/v1/models", "/v1/nothing", "/docs", "/openapi.json", "/server_info"):
            response = server.http.get(path)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key", path
        for path in ("/health", "/live", "/metrics"):
            assert server.http.get(path).status_code == 200
        for key, status in (("open-sesame", 200), ("root", 200), ("ópen-sesame", 401), ("x", 401)):
            value = f"Bearer {key}".encode()
            assert server.http.get("/v1/models", headers={b"authorization": value}).status_code == status, key
        assert server.http.get("/v1/models", headers={b"authorization": b"Basic open-sesame"}).status_code == 401
        shown = server.http.get("/server_info", headers={"authorization": "Bearer root"})
        assert "open-sesame" not in shown.text and shown.json()["waiting_requests"] == []
        assert (
            "waiting_requests"
            not in server.http.get("/server_info", headers={"authorization": "Bearer open-sesame"}).json()
        )


def test_a_body_over_the_limit() -> None:
    config = Config().replace(server={"max_body_bytes": 2048})
    with LiveServer(config) as server:
        assert server.post("/v1/completions", TEXT | {"user": "x" * 3000}).status_code == 413

        def chunks() -> Any:
            yield b'{"model": "demo", "prompt": "'
            yield b"x" * 3000

        response = server.http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
        assert response.status_code == 413 and response.json()["error"]["type"] == "invalid_request_error"
        assert server.post("/v1/completions", TEXT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_client_that_leaves_ends_its_request(server: LiveServer, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": "demo", "stream": stream, "prompt": "x", "text": "x"}
    body |= {"messages": [{"role": "user", "content": "x"}]}
    if path == "/generate":
        body |= {"sampling_params": {"ignore_eos": True, "max_new_tokens": 400}}
    else:
        body |= {"ignore_eos": True, "max_tokens": 400}
    server.link.delay = 0.05
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        data = server.http.build_request("POST", path, json=body).content
        head = f"POST {path} HTTP/1.1\r\nhost:\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        server.wait(lambda: len(server.link.running) == 1, "the request did not start")
        if stream:
            assert b"200" in connection.recv(100)
    server.wait(lambda: len(server.link.aborted) == 1, "the request was not aborted")  # it ends by itself after 20 s
    server.wait(lambda: server.engine.num_live == 0, "the engine still holds the request")


def test_an_error_in_the_middle_of_a_stream(server: LiveServer) -> None:
    def broken(prompt: list[int], params: Any) -> str:
        raise AssertionError

    reply_with(server, "fine so far and going on")
    server.link.delay = 0.02
    with server.http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")

        def die() -> None:
            server.engine._fail_all(EngineDeadError("gone"))

        server.call(die)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]" and '"error"' in events[-2] and "engine_dead" in events[-2]
    server.wait(lambda: not server.link.running, "still running")


def test_generate(server: LiveServer) -> None:
    reply_with(server, "native text")
    answer = server.post("/generate", {"text": "Hi", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}).json()
    meta = answer["meta_info"]
    assert answer["text"] == "native text" and meta["finish_reason"]["type"] == "stop"
    assert meta["prompt_tokens"] == len(server.link.seen[-1].prompt_token_ids)
    assert meta["completion_tokens"] == len(answer["output_ids"])
    many = server.post("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}}).json()
    assert [one["meta_info"]["finish_reason"] for one in many] == [{"type": "length", "length": 2}] * 2
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = server.post("/generate", body).json()["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [5, 6, 7]
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == len(meta["output_top_logprobs"])
    lines = server.post("/generate", {"text": "Hi", "stream": True}).text.strip().split("\n\n")
    assert '"text":"native text"' in lines[-2] and lines[-1] == "data: [DONE]"


def test_what_the_server_says_it_is(server: LiveServer) -> None:
    assert server.http.get("/get_model_info").json()["model_path"] == "demo-path"
    info = server.http.get("/get_server_info").json()
    assert info["context_length"] == 512 and info["max_running_requests"] == 8
    assert server.http.get("/version").json()["version"] == info["version"]


def test_metrics(server: LiveServer) -> None:
    reply_with(server, "short")
    before = values(server.http.get("/metrics").text)
    server.post("/v1/completions", TEXT)
    after = server.http.get("/metrics").text
    for name in (
        'jaxserve:request_success_total{finished_reason="stop"}',
        "jaxserve:time_to_first_token_seconds_count",
    ):
        assert values(after)[name] == before.get(name, 0) + 1, name
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert name in after
    [config] = [line for line in after.splitlines() if line.startswith("vllm:cache_config_info{")]
    for label in ('block_size="16"', 'num_gpu_blocks="256"', 'kv_cache_size_tokens="4096"'):
        assert label in config
    assert "kv_cache_max_concurrency=" in config and config.endswith("} 1.0")
    assert server.http.head("/metrics").status_code == 200


def test_a_request_id_is_given_back_if_it_is_sane(server: LiveServer) -> None:
    assert server.http.get("/live", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert server.http.get("/live", headers={"x-request-id": "a" * 200}).headers["x-request-id"].startswith("req-")


def test_two_requests_with_one_id(server: LiveServer) -> None:
    """Each is answered as if it were alone."""
    server.link.delay = 0.05
    expected = server.post("/v1/completions", TEXT).json()["choices"][0]["text"]
    body = TEXT | {"request_id": "mine", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: closing it would close the stream
        assert '"id":"mine"' in next(lines)
        second = server.post("/v1/completions", TEXT | {"request_id": "mine"}).json()
        rest = list(lines)
    assert (second["id"], second["choices"][0]["text"]) == ("mine", expected)
    assert rest[-2] == "data: [DONE]" or "data: [DONE]" in rest
    first, again, third = (request.request_id for request in server.link.seen)
    assert len({first, again, third}) == 3


def test_a_full_queue_is_a_429(caplog: pytest.LogCaptureFixture) -> None:
    config = Config().replace(scheduler={"max_queued_requests": 1}, logging={"requests": True})
    with LiveServer(config) as server, caplog.at_level("INFO", logger="jaxserve.api.http.middleware"):
        server.call(server.link.hold.clear)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.post, "/v1/completions", TEXT | {"n": 8})
            server.wait(lambda: server.engine.num_live == 8, "the first is live")
            response = server.post("/v1/completions", TEXT | {"n": 2})
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
            server.call(server.link.hold.set)
            assert first.result().status_code == 200
        assert server.post("/v1/completions", TEXT | {"n": 20}).status_code == 400  # no wait would help
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[2] for line in lines] == ["429", "200", "400"]


@pytest.mark.parametrize("path", sorted(GENERATING_PATHS))
def test_a_full_queue_refuses_before_the_body_is_read(path: str) -> None:
    """After the key, and nothing but what would have to wait."""
    config = Config().replace(scheduler={"max_queued_requests": 1}, server={"api_key": "k"})
    with LiveServer(config) as server:
        key = {"authorization": "Bearer k", "content-type": "application/json"}
        server.link.delay = 0.2
        full = TEXT | {"n": server.link.info.max_num_seqs + 1, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=full, headers=key):
            assert server.http.post(path, content=b"{not json").status_code == 401
            refused = server.http.post(path, content=b"{not json", headers=key)
            assert refused.status_code == {"/v1/messages": 529, "/v1/responses": 503}.get(path, 429)
            assert refused.headers["retry-after"] == "1"
            assert "the queue is full" in refused.text
            assert server.http.post("/tokenize", json=TEXT, headers=key).status_code == 200
            assert server.http.get("/v1/models", headers=key).status_code == 200
        server.wait(lambda: not server.engine.num_live, "the client's leaving is not seen")
        assert server.http.post(path, content=b"{not json", headers=key).status_code == 400
