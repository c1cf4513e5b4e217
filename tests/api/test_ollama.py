"""Ollama's routes over a real socket, read by Ollama's own client: streamed and whole answers are equal."""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from pydantic import SecretStr

from jaxserve.config import Config
from jaxserve.errors import EngineDeadError

from .conftest import LiveServer, reply_with, serving
from .fakes import MAX_MODEL_LEN

USER = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
VARYING = ("created_at", "total_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
def client(server: LiveServer) -> Iterator[ollama.Client]:
    found = ollama.Client(host=server.url)
    yield found
    found.close()


def lines(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.http.post(path, content=json.dumps(body).encode())  # without a content type, as curl -d
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


def both(server: LiveServer, **body: Any) -> dict[str, Any]:
    """An answer of /api/chat, whole and streamed: the joined stream must be equal."""
    body = {"model": "demo", "messages": USER} | body
    whole = server.post("/api/chat", body | {"stream": False}).json()
    parts = lines(server, "/api/chat", body)
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    logprobs: list[Any] = []
    for part in parts:
        for name in ("content", "thinking"):
            if name in part["message"]:
                message[name] = message.get(name, "") + part["message"][name]
        if "tool_calls" in part["message"]:
            message["tool_calls"] = message.get("tool_calls", []) + part["message"]["tool_calls"]
        logprobs += part.get("logprobs", ())
    joined = parts[-1] | {"message": message} | ({"logprobs": logprobs} if logprobs else {})
    assert comparable(joined) == comparable(whole)
    return whole


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"id": None} for call in answer["message"].get("tool_calls", ())]
    message = answer["message"] | ({"tool_calls": calls} if calls else {})
    return {name: value for name, value in answer.items() if name not in VARYING} | {"message": message}


def prompt_of(server: LiveServer) -> str:
    return server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids, skip_special_tokens=False)


def test_text(server: LiveServer) -> None:
    reply_with(server, "It is sunny.")
    answer = both(server, options={"temperature": 0, "seed": 3, "repeat_penalty": 1.1, "num_ctx": 4096, "mirostat": 1})
    assert (answer["message"], answer["done_reason"]) == ({"role": "assistant", "content": "It is sunny."}, "stop")
    request = server.link.seen[-1]
    assert answer["prompt_eval_count"] == len(request.prompt_token_ids) and answer["eval_count"] > 0
    assert answer["total_duration"] > answer["eval_duration"] >= 0
    params = request.params
    assert (params.temperature, params.seed, params.repetition_penalty) == (0, 3, 1.1)
    assert params.max_tokens == server.link.info.max_model_len - len(request.prompt_token_ids)
    assert both(server, options={"num_predict": 2})["done_reason"] == "length"
    assert both(server, options={"stop": ["sunny"]})["message"]["content"] == "It is "


def test_reasoning_is_a_field_of_its_own(server: LiveServer) -> None:
    reply_with(server, "<think>\nHm.\n</think>\n\nSunny.")
    message = both(server, think=True)["message"]
    assert message["thinking"].strip() == "Hm." and message["content"].strip() == "Sunny."
    assert "/think" in prompt_of(server)
    both(server, think=False)
    assert "/think" not in prompt_of(server)


def test_calls_are_whole_and_other_ones_are_text(server: LiveServer) -> None:
    reply_with(server, f"Let me look.\n{CALL}")
    answer = both(server, tools=[WEATHER])
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}
    cut = both(server, tools=[WEATHER], options={"stop": ["ris"]})
    assert "tool_calls" not in cut["message"]
    assert cut["message"]["content"] == 'Let me look.{"name": "weather", "arguments": {"city": "Pa'
    early = both(server, tools=[WEATHER], options={"stop": ["arguments"]})
    assert "tool_calls" not in early["message"] and early["message"]["content"] == 'Let me look.{"name": "weather"'
    reply_with(server, CALL.replace('"Paris"', "Paris"))
    broken = both(server, tools=[WEATHER])
    assert broken["message"]["content"] == '{"name": "weather", "arguments": {"city": Paris}'


def test_the_conversation_of_a_loop_has_the_prompt_that_chat_gives_it(server: LiveServer) -> None:
    reply_with(server, "Done.")
    arguments = {"city": "Paris"}
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    calls = [{"function": {"name": "weather", "arguments": arguments}}]
    both(server, messages=[*USER, {"role": "assistant", "content": "", "tool_calls": calls}, result], tools=[WEATHER])
    prompt = server.link.seen[-1].prompt_token_ids
    written = {"name": "weather", "arguments": '{"city":"Paris"}'}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": written}]}
    answer = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    body = {"model": "demo", "messages": [*USER, turn, answer], "tools": [WEATHER]}
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert server.link.seen[-1].prompt_token_ids == prompt


def test_a_final_message_of_the_assistant_is_continued(server: LiveServer) -> None:
    reply_with(server, " sunny.")
    answer = both(server, messages=[*USER, {"role": "assistant", "content": "It is"}])
    assert answer["message"]["content"] == " sunny." and prompt_of(server).endswith("It is")


def test_constraints(server: LiveServer) -> None:
    reply_with(server, "{}")
    for wanted, kind in (("json", "json_object"), (SCHEMA, "json_schema")):
        both(server, format=wanted)
        grammar = server.link.seen[-1].params.grammar
        assert grammar is not None and grammar.kind == kind
    assert json.loads(grammar.source)["additionalProperties"] is False  # as llama.cpp does
    both(server, format="")
    assert server.link.seen[-1].params.grammar is None


def test_log_probabilities(server: LiveServer) -> None:
    reply_with(server, "one two")
    answer = both(server, logprobs=True, top_logprobs=2)
    assert "".join(entry["token"] for entry in answer["logprobs"]).startswith("one two")
    assert all(len(entry["top_logprobs"]) == 2 for entry in answer["logprobs"])


def test_generate(server: LiveServer, client: ollama.Client) -> None:
    reply_with(server, "<think>\nHm.\n</think>\n\nblue")
    found = client.generate("demo", "The sky is", system="Be brief.", think=True)
    assert (found.response or "").strip() == "blue" and (found.thinking or "").strip() == "Hm."
    assert "Be brief." in prompt_of(server)
    reply_with(server, " blue")
    raw = client.generate("demo", "The sky is", raw=True)
    assert raw.response == " blue" and prompt_of(server).endswith("The sky is") and "im_start" not in prompt_of(server)
    streamed = client.generate("demo", "The sky is", raw=True, stream=True)
    assert "".join(part.response or "" for part in streamed) == " blue"


def test_a_request_without_a_prompt_asks_for_the_model(server: LiveServer, client: ollama.Client) -> None:
    assert client.generate("demo", "").done_reason == "load"
    assert client.chat("demo", messages=[], keep_alive=0).done_reason == "unload"
    assert client.generate("demo", "", keep_alive=-1).response == "" and not server.link.seen


def test_what_is_served(server: LiveServer, client: ollama.Client) -> None:
    served = server.link.info.served_names
    assert [model.model for model in client.list().models] == served
    assert [model.name for model in client.ps().models] == served
    shown = client.show("demo:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == server.link.info.max_model_len
    assert server.http.get("/").text == "Ollama is running"
    assert tuple(map(int, server.http.get("/api/version").json()["version"].split("."))) >= (0, 14, 0)
    for path in ("/", "/api/version", "/api/tags"):
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path


@pytest.mark.parametrize(
    ("facts", "able"), [({"is_embedding": True}, ["embedding"]), ({"labels": ["LABEL_0", "LABEL_1"]}, [])]
)
def test_what_models_can_that_make_no_text(
    server: LiveServer, client: ollama.Client, facts: dict[str, Any], able: list[str]
) -> None:
    with serving(server, **facts):
        assert client.show("demo").capabilities == able
        assert server.http.get("/api/tags").json()["models"][0]["capabilities"] == able
        answer = server.post("/api/chat", {"model": "demo", "messages": USER})
    assert answer.status_code == 400 and "demo" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "none", "messages": USER}, 404, "none"),
        ("/api/chat", {"model": "demo", "messages": [{"role": "user", "content": "", "images": ["A"]}]}, 400, "images"),
        ("/api/chat", {"model": "demo", "messages": USER, "top_logprobs": 2}, 400, "top_logprobs"),
        ("/api/chat", {"model": "demo", "messages": USER, "options": {"temperature": "hot"}}, 400, "temperature"),
        ("/api/chat", {"model": "demo", "messages": USER, "format": {"type": 5}}, 400, "format"),
        ("/api/chat", {"model": "demo", "messages": USER, "tools": [{"type": "x"}]}, 400, "tools.0"),
        ("/api/generate", {"model": "demo", "prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
        ("/api/generate", {"model": "demo", "prompt": "x", "context": [1]}, 400, "context"),
        ("/api/generate", {"model": "demo", "prompt": "x", "suffix": "y", "system": "z"}, 400, "system"),
        ("/api/generate", {"model": "demo", "prompt": "word " * 9000}, 400, "context"),
        ("/api/embed", {"model": "demo", "input": ""}, 200, ""),
        ("/api/show", {}, 400, "model"),
        ("/api/pull", {"model": "demo"}, 501, "does not change"),
        ("/api/nothing", {}, 404, "no route"),
    ],
)
def test_errors_are_a_text(server: LiveServer, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = server.http.post(path, content=json.dumps(body).encode())
    assert answer.status_code == status, answer.text
    assert status == 200 or (words in answer.json()["error"] and set(answer.json()) == {"error"})


def test_a_web_page_must_declare_json(server: LiveServer) -> None:
    """A form that any page may post needs no preflight, so its Origin header gives it away."""
    body = json.dumps({"model": "demo", "prompt": "x"}).encode()
    for origin, status in (("http://elsewhere.example", 403), (server.url, 400)):
        headers = {"origin": origin, "content-type": "text/plain"}
        assert server.http.post("/api/generate", content=body, headers=headers).status_code == status
    assert not server.link.seen


def test_an_error_ends_a_stream_with_one_line(server: LiveServer) -> None:
    server.link.delay = 0.05
    with server.http.stream("POST", "/api/chat", json={"model": "demo", "messages": USER}) as response:
        parts = response.iter_lines()
        next(parts)
        server.call(lambda: server.engine._fail_all(EngineDeadError("gone")))
        *_, last = parts
    assert json.loads(last) == {"error": "gone"}


def test_a_key_opens_the_routes() -> None:
    with LiveServer(Config().replace(server={"api_key": SecretStr("k")})) as server:
        refused = server.http.get("/api/tags")
        assert refused.status_code == 401 and set(refused.json()) == {"error"}
        assert server.http.get("/api/tags", headers={"authorization": "Bearer k"}).status_code == 200
        assert server.http.get("/").status_code == 200  # the probe needs none


def test_embeddings(client: ollama.Client) -> None:
    found = client.embed("demo", ["one", "two"])
    older = client.embeddings("demo", "one")
    assert len(found.embeddings) == 2 and list(found.embeddings[0]) == pytest.approx(list(older.embedding))
    assert found.prompt_eval_count


def test_a_text_that_is_too_long_is_cut_or_refused(server: LiveServer, client: ollama.Client) -> None:
    long = "word " * 600
    with serving(server, is_embedding=True):
        assert len(client.embed("demo", ["one", long]).embeddings) == 2
        assert len(server.link.seen[-1].prompt_token_ids) <= MAX_MODEL_LEN
        assert client.embed("demo", long, truncate=True).embeddings == client.embed("demo", long).embeddings
        assert client.embeddings("demo", long).embedding
        with pytest.raises(ollama.ResponseError, match="context length") as caught:
            client.embed("demo", long, truncate=False)
    assert caught.value.status_code == 400
