"""Responses that fail, wait or are refused: wrong bodies by their field, and failures before and in the stream."""

from typing import Any

import httpx2
import openai
import pytest

from jaxserve.errors import EngineDeadError

from .conftest import LiveServer, reply_with
from .loop_meter import LoopMeter
from .test_responses import NOTE, SPACE, TIME, USER, WEATHER, Json, raw_events

HELD = 0.1  # CPU seconds; it is 0.013 on an idle machine


def error_of(response: httpx2.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["param"], error["message"]


CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "nothing"}]}, "input.0.type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [CALLED | {"call_id": None}]}, "input.0.call_id"),
        ({"input": [CALLED | {"arguments": None}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": [CALLED, {"type": "function_call_output", "call_id": "c"}]}, "input.1.output"),
        ({"input": [{"role": "user", "content": [{"type": "video"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input.0.content.0"),
        ({"instructions": [{"type": "nothing"}]}, "instructions.0.type"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"include": ["everything"]}, "include.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "wrong"}}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text.format"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools.0.tools"),
        ({"tools": [SPACE | {"tools": [SPACE]}]}, "tools.0.tools.0"),
        ({"tools": [SPACE, WEATHER | {"name": "mcp__weather"}]}, "tools.1"),
        ({"tools": [WEATHER, NOTE | {"name": "weather"}]}, "tools.1"),
        ({"tools": [WEATHER, WEATHER, WEATHER | {"description": "another"}]}, "tools.2"),
        ({"tools": [NOTE | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools.0.format.definition"),
        ({"tools": [NOTE | {"format": "text"}]}, "tools.0.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}, "tools": [WEATHER, {"type": "web_search"}]}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [WEATHER]}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [TIME]}, "tools": [WEATHER]}, "tool_choice.tools.0"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}, "tools": [WEATHER]},
            "tool_choice.tools",
        ),
    ],
)
def test_wrong_bodies(server: LiveServer, change: Json, param: str) -> None:
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        if path.endswith("tokens") and set(change) & {"text", "structured_outputs"}:
            continue  # the format of the answer is no part of its prompt
        status, named, message = error_of(server.post(path, {"model": "demo", "input": "x"} | change))
        assert (status, named) == (400, param), message


def test_a_prompt_that_is_too_long(server: LiveServer) -> None:
    error = server.post("/v1/responses", {"input": "word " * 700}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_errors_before_the_stream_are_plain(server: LiveServer) -> None:
    body = {"model": "other", "input": "x", "stream": True}
    assert error_of(server.post("/v1/responses", body))[:2] == (404, "model")
    assert server.http.put("/v1/responses").status_code == 405


def test_a_failure_in_the_stream(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in both forms, then the failed response with what there is; unstreamed it is an HTTP error."""
    reply_with(server, "word " * 50)
    generate = server.engine.generate

    async def dies(*args: Any, **keys: Any) -> Any:
        number = 0
        async for output in generate(*args, **keys):
            yield output
            number += 1
            if number == 3:
                raise EngineDeadError("The engine is gone.")

    monkeypatch.setattr(server.engine, "generate", dies)
    *_, told, failed = raw_events(server)
    assert (told["type"], told["code"], told["error"]["code"]) == ("error", "engine_dead", "engine_dead")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "The engine is gone."}
    assert failed["sequence_number"] == told["sequence_number"] + 1
    assert server.post("/v1/responses", {"input": "x"}).status_code == 503
    with pytest.raises(openai.APIError, match="The engine is gone"):
        list(server.client.responses.create(input="x", stream=True))


def test_a_client_that_leaves_ends_its_request(server: LiveServer) -> None:
    reply_with(server, "word " * 500)
    server.link.delay = 0.01
    with server.http.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as response:
        next(response.iter_lines())
    server.wait(lambda: not server.link.running, "the request went on without its client")
    assert server.link.aborted


def test_models_has_the_list_that_codex_looks_for(server: LiveServer) -> None:
    assert server.http.get("/v1/models").json()["models"] == []


def test_a_hostile_list_of_tools_holds_nobody_up(server: LiveServer) -> None:
    """Many tools that are all named many times; a hosted tool of megabytes, which three events would repeat."""
    reply_with(server, "fine")
    many = [{"type": "function", "name": f"f{number}"} for number in range(1024)]
    last = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f1023"}] * 1024}
    space = {"type": "namespace", "name": "n", "tools": many}
    whole = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "n"}] * 1024}
    bodies: list[Json] = [
        {"tools": many, "tool_choice": last},
        {"tools": [space], "tool_choice": whole},
        {"tools": [{"type": "web_search", "x": "y" * 6_000_000}], "stream": True},
    ]
    with LoopMeter(server) as meter:
        for body in bodies:
            assert server.post("/v1/responses", {"input": "x"} | body).status_code in (200, 400)
    assert meter.longest < HELD
    assert server.post("/v1/responses", {"input": [USER] * 100_000}).status_code == 413
    assert server.post("/v1/responses", {"input": [USER] * 8193}).status_code == 400
