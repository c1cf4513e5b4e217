"""Anthropic's Messages over a real socket, read by Anthropic's own client: streamed and whole answers are equal."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from pydantic import SecretStr

from jaxserve.config import Config
from jaxserve.errors import QueueFullError

from .conftest import LiveServer, reply_with

USER = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather in a city.", "input_schema": SCHEMA}
TIME = {"name": "time", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest.fixture
def claude(server: LiveServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def both(claude: Any, **keys: Any) -> Any:
    """An answer whole and streamed; the SDK's accumulator must make the same message of the stream."""
    keys = {"model": "demo", "messages": USER, "max_tokens": 200} | keys
    whole = claude.messages.create(**keys)
    with claude.messages.stream(**keys) as stream:
        streamed = stream.get_final_message()
    assert comparable(streamed) == comparable(whole)
    return whole


def test_models(claude: Any) -> None:
    model, *_ = claude.models.list()
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == ("demo", "model", "demo", 512)
    assert model.created_at.year >= 2026 and claude.models.retrieve("demo") == model


def comparable(message: Any) -> dict[str, Any]:
    found = message.to_dict()
    ids = {"id": None}
    content = [{k: v for k, v in block.items() if v is not None} | ids for block in found["content"]]
    usage = {name: value for name, value in found["usage"].items() if value is not None}
    return {k: v for k, v in found.items() if v is not None} | ids | {"content": content, "usage": usage}


def prompt_of(server: LiveServer) -> str:
    return server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids, skip_special_tokens=False)


def test_text(server: LiveServer, claude: Any) -> None:
    reply_with(server, "It is sunny.")
    message = both(claude, system="Be brief.")
    assert message.id.startswith("msg_") and [block.text for block in message.content] == ["It is sunny."]
    assert (message.role, message.type, message.stop_reason, message.model) == (
        *("assistant", "message"),
        *("end_turn", "demo"),
    )
    usage = message.usage
    prompt = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert prompt == len(server.link.seen[-1].prompt_token_ids) and usage.output_tokens > 0
    assert "Be brief." in prompt_of(server)


def test_calls(server: LiveServer, claude: Any) -> None:
    reply_with(server, f"Let me look.\n{CALL}\n{OTHER}")
    message = both(claude, tools=[WEATHER, TIME])
    text, first, second = message.content
    assert text.text == "Let me look." and message.stop_reason == "tool_use"
    assert (first.name, first.input, second.name, second.input) == ("weather", {"city": "Paris"}, "time", {})
    assert first.id.startswith("toolu_") and first.id != second.id
    one = both(claude, tools=[WEATHER, TIME], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["text", "tool_use"]
    server.wait(lambda: not server.link.running, "the rest was not aborted")


def test_a_named_tool_is_forced_and_all_stay_in_the_prompt(server: LiveServer, claude: Any) -> None:
    reply_with(server, CALL)
    message = both(claude, tools=[WEATHER, TIME], tool_choice={"type": "tool", "name": "weather"})
    assert message.stop_reason == "tool_use" and [block.type for block in message.content] == ["tool_use"]
    grammar = server.link.seen[-1].params.grammar
    assert grammar is not None and "weather" in grammar.source and '"time"' not in grammar.source
    assert "weather" in prompt_of(server) and '"time"' in prompt_of(server)


def test_an_answer_without_text_has_one_empty_block(server: LiveServer, claude: Any) -> None:
    reply_with(server, "")
    assert [block.to_dict() for block in both(claude).content] == [{"type": "text", "text": ""}]


def test_stop_reasons(server: LiveServer, claude: Any) -> None:
    reply_with(server, "one two three")
    stopped = both(claude, stop_sequences=["two"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "two", "one ")
    assert both(claude, max_tokens=2).stop_reason == "max_tokens"


def test_no_tokens_fill_the_prefix_cache_only(server: LiveServer, claude: Any) -> None:
    for said in ("one two", "", CALL):  # the engine samples a token, also the end, which is dropped
        reply_with(server, said)
        message = both(claude, max_tokens=0, tools=[WEATHER])
        assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
        assert server.link.seen[-1].params.max_tokens == 1


def test_the_context_ends_the_text(server: LiveServer, claude: Any) -> None:
    reply_with(server, "word " * 20_000)
    with claude.messages.stream(model="demo", messages=USER, max_tokens=32_000) as stream:
        assert stream.get_final_message().stop_reason == "model_context_window_exceeded"


def test_a_prompt_over_the_context_has_the_words_that_claude_code_acts_on(claude: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        claude.messages.create(model="demo", max_tokens=1, messages=[{"role": "user", "content": "word " * 9000}])


def test_a_conversation_of_blocks(server: LiveServer, claude: Any) -> None:
    """Results in another order than the calls, text behind them, an image, a late system message, dropped marks."""
    reply_with(server, "Done.")
    uses = [
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "noon"}]},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny", "is_error": False},
        {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    ]
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": "A late instruction."},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, *uses]},
        {"role": "user", "content": results},
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ]
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    extra = {"context_management": {"edits": []}, "metadata": {"user_id": "{}"}}
    both(claude, messages=messages, system=system, tools=[WEATHER, TIME, hosted], extra_body=extra)
    prompt = prompt_of(server)
    assert "billing" not in prompt and "web_search" not in prompt
    shown = ["You are an agent.", "Hello", '"city"', "sunny", "noon", "And now?", "image was here"]
    places = [prompt.rindex(text) for text in shown]
    assert places == sorted(places) and "A late instruction." in prompt


def test_a_final_assistant_message_is_continued(server: LiveServer, claude: Any) -> None:
    reply_with(server, " Paris.")
    message = both(claude, messages=[*USER, {"role": "assistant", "content": "The capital is"}])
    assert message.content[0].text == " Paris." and prompt_of(server).endswith("The capital is")


def test_a_schema(server: LiveServer, claude: Any) -> None:
    reply_with(server, '{"city": "Paris"}')
    format_ = {"type": "json_schema", "schema": SCHEMA | {"additionalProperties": False}}
    message = both(claude, output_config={"effort": "low", "format": format_})
    assert json.loads(message.content[0].text) == {"city": "Paris"}
    grammar = server.link.seen[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_schema"


def test_thinking() -> None:
    config = Config.model_validate({"model": {"reasoning_parser": "qwen3"}})
    with LiveServer(config) as server, anthropic.Anthropic(base_url=server.url, api_key="x") as claude:
        reply_with(server, "<think>\nHm, Paris.\n</think>\n\nIt is Paris.")
        budget = {"type": "enabled", "budget_tokens": 1024}
        thought, text = both(claude, thinking=budget).content
        assert (thought.type, thought.thinking.strip(), text.text) == ("thinking", "Hm, Paris.", "It is Paris.")
        limit = server.link.seen[-1].params.thinking
        assert thought.signature and limit is not None and limit.tokens == 1024
        hidden, text = both(claude, thinking={"type": "adaptive", "display": "omitted"}).content
        assert (hidden.thinking, text.text) == ("", "It is Paris.") and hidden.signature
        history = [*USER, {"role": "assistant", "content": [thought.to_dict(), text.to_dict()]}, *USER]
        assert both(claude, messages=history).usage.output_tokens_details.thinking_tokens > 0


def test_count_tokens_counts_the_prompt(server: LiveServer, claude: Any) -> None:
    reply_with(server, "x")
    keys: dict[str, Any] = {"model": "demo", "messages": USER, "system": "Be brief.", "tools": [WEATHER]}
    claude.messages.create(**keys, max_tokens=1)
    assert claude.messages.count_tokens(**keys).input_tokens == len(server.link.seen[-1].prompt_token_ids)


def test_the_events_of_a_stream(server: LiveServer) -> None:
    reply_with(server, "Hi")
    body = {"model": "demo", "messages": USER, "max_tokens": 9, "stream": True}
    text = server.post("/v1/messages", body).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert names == [each["type"] for each in data] and "[DONE]" not in text
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert data[0]["message"]["role"] == "assistant" and data[0]["message"]["usage"]["output_tokens"] == 0


def error_of(response: httpx2.Response) -> tuple[int, str, str]:
    body = response.json()
    assert body["type"] == "error" and body["request_id"] == response.headers["request-id"]
    return response.status_code, body["error"]["type"], body["error"]["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "weather"}}]}, "tools.0.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages.0.content.0",
        ),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": ["x" * 1000] * 5}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [WEATHER]}, "no tool 'x'"),
        (
            {
                "tool_choice": {"type": "tool", "name": "web_search"},
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            },
            "not run by this server",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "wrong"}}}}, "output_config.format"),
    ],
)
def test_wrong_bodies(server: LiveServer, change: dict[str, Any], words: str) -> None:
    body = {"model": "demo", "messages": USER, "max_tokens": 9} | change
    status, kind, message = error_of(server.post("/v1/messages", body))
    assert (status, kind) == (400, "invalid_request_error") and words in message


def test_errors_before_the_route_have_the_same_form(server: LiveServer) -> None:
    assert error_of(server.post("/v1/messages", {"model": "other", "messages": USER, "max_tokens": 1}))[:2] == (
        404,
        "not_found_error",
    )
    assert error_of(server.http.get("/v1/messages"))[:2] == (405, "invalid_request_error")
    assert error_of(server.http.post("/v1/messages/nothing"))[:2] == (404, "not_found_error")
    response = server.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert error_of(response)[:2] == (400, "invalid_request_error")


def test_keys_and_a_full_queue() -> None:
    keys = {"server": {"api_key": SecretStr("secret")}, "scheduler": {"max_queued_requests": 1}}
    with LiveServer(Config.model_validate(keys)) as server:
        body = {"model": "demo", "messages": USER, "max_tokens": 4}
        assert error_of(server.post("/v1/messages", body))[:2] == (401, "authentication_error")
        for header in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            reply_with(server, "x")
            assert server.post("/v1/messages", body, headers=header).status_code == 200
        assert server.post("/v1/chat/completions", body, headers={"x-api-key": "secret"}).status_code == 200
        assert server.post("/v1/messages", body, headers={"x-api-key": "wrong"}).status_code == 401
        full = QueueFullError("The queue is full.")

        def refuse(*_: Any) -> None:
            raise full

        server.engine.check_queue = refuse  # type: ignore[method-assign]
        response = server.post("/v1/messages", body, headers={"x-api-key": "secret"})
        assert error_of(response)[:2] == (529, "overloaded_error") and response.headers["retry-after"] == "1"


def test_the_same_conversation_gives_the_same_prompt_as_chat(server: LiveServer, claude: Any) -> None:
    reply_with(server, "x")
    claude.messages.create(model="demo", max_tokens=1, messages=USER, system="Be brief.", tools=[WEATHER])
    function = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
    server.client.chat.completions.create(
        model="demo",
        max_tokens=1,
        messages=[{"role": "system", "content": "Be brief."}, *USER],
        tools=[{"type": "function", "function": function}],
    )
    first, second = server.link.seen[-2:]
    assert first.prompt_token_ids == second.prompt_token_ids


def test_a_client_that_leaves_ends_its_request(server: LiveServer) -> None:
    reply_with(server, "word " * 500)
    server.link.delay = 0.01
    body = {"model": "demo", "messages": USER, "max_tokens": 400, "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as response:
        next(response.iter_lines())
    server.wait(lambda: not server.link.running, "the request went on without its client")
    assert server.link.aborted


def assistant_calls(*ids: str, **fields: Any) -> dict[str, Any]:
    blocks = [{"type": "tool_use", "id": each, "name": "weather", "input": {"city": each}} | fields for each in ids]
    return {"role": "assistant", "content": blocks}


def result(call_id: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": text} | fields


def test_a_call_that_a_stop_sequence_cuts_is_not_one_to_run(server: LiveServer, claude: Any) -> None:
    reply_with(server, CALL)
    cut = claude.messages.create(model="demo", messages=USER, max_tokens=200, tools=[WEATHER], stop_sequences=["Paris"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "Paris")
    assert cut.content[0].input == {"INVALID_JSON": '{"city": "'}
    early = both(claude, tools=[WEATHER], stop_sequences=["arguments"])  # the call has begun, its arguments have not
    assert (early.stop_reason, early.content[0].input) == ("stop_sequence", {})
    complete = both(claude, tools=[WEATHER], stop_sequences=["</tool_call>"])
    assert complete.stop_reason == "tool_use" and complete.content[0].input == {"city": "Paris"}


def test_arguments_that_are_no_json_are_not_lost(server: LiveServer, claude: Any) -> None:
    reply_with(server, CALL.replace('"Paris"', "Paris"))
    keys = {"model": "demo", "messages": USER, "max_tokens": 200, "tools": [WEATHER]}
    message = claude.messages.create(**keys)
    assert message.stop_reason == "tool_use" and message.content[0].input == {"INVALID_JSON": '{"city": Paris}'}
    events = [event for event in claude.messages.create(**keys, stream=True) if event.type == "content_block_delta"]
    assert "".join(event.delta.partial_json for event in events) == '{"city": Paris}'


def test_arguments_are_passed_on_as_written(server: LiveServer) -> None:
    written = '{"city": 123456789012345678901234567890, "x": "\\ud83d"}'
    body = {"model": "demo", "messages": USER, "max_tokens": 200, "tools": [WEATHER]}
    reply_with(server, f'<tool_call>\n{{"name": "weather", "arguments": {written}}}\n</tool_call>')
    answer = server.post("/v1/messages", body)
    assert written in answer.text and answer.json()["stop_reason"] == "tool_use"
    history = [*USER, assistant_calls("a", input={"n": 2**70}), {"role": "user", "content": [result("a", "x")]}]
    assert server.post("/v1/messages", body | {"messages": history}).status_code == 200
    assert str(2**70) in prompt_of(server)


def test_results_stand_behind_their_calls_in_order(server: LiveServer, claude: Any) -> None:
    reply_with(server, "ok")
    first = {"role": "user", "content": [result("b", "second", is_error=True), {"type": "text", "text": "And now?"}]}
    second = {"role": "user", "content": [result("a", "first")]}
    both(claude, messages=[*USER, assistant_calls("a", "b"), first, second])
    places = [prompt_of(server).rindex(text) for text in ("first", "Error: second", "And now?")]
    assert places == sorted(places)


def test_a_prefill_behind_a_call_keeps_the_call(server: LiveServer, claude: Any) -> None:
    reply_with(server, "ok")
    both(claude, messages=[*USER, assistant_calls("a"), {"role": "assistant", "content": "So"}])
    assert '"city": "a"' in prompt_of(server) or '"city":"a"' in prompt_of(server)
    assert prompt_of(server).endswith("So")
    both(claude, messages=[*USER, {"role": "assistant", "content": []}])
    assert prompt_of(server).count("<|im_start|>assistant") == 1


def test_a_hosted_tool_without_a_name_is_dropped_and_an_own_one_refused(server: LiveServer) -> None:
    reply_with(server, "ok")
    body = {"model": "demo", "messages": USER, "max_tokens": 9}
    hosted = {"type": "mcp_toolset", "mcp_server_name": "x"}
    assert server.post("/v1/messages", body | {"tools": [hosted]}).status_code == 200
    assert "tools.0.name" in error_of(server.post("/v1/messages", body | {"tools": [{"input_schema": {}}]}))[2]
    wrong = {"messages": [{"role": "user", "content": assistant_calls("a")["content"]}]}
    assert "messages.0.content.0" in error_of(server.post("/v1/messages", body | wrong))[2]


def test_two_tools_of_one_name_are_refused(server: LiveServer) -> None:
    """As Anthropic does. OpenAI's chat takes them."""
    tools = [{"name": "f", "input_schema": {"type": "object"}}] * 2
    body = {"model": "demo", "messages": USER, "tools": tools}
    for path, limit in (("/v1/messages", {"max_tokens": 9}), ("/v1/messages/count_tokens", {})):
        answer = server.post(path, body | limit)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == "tools: Tool names must be unique."


def test_the_watermark_of_the_server_is_on_every_route() -> None:
    with LiveServer(Config().replace(server={"watermark_key": 12345678901})) as server:
        reply_with(server, "ok")
        chat = {"model": "demo", "messages": USER, "max_tokens": 9, "temperature": 1.0}
        bodies: dict[str, Any] = {"/v1/messages": chat, "/v1/chat/completions": chat, "/generate": {"text": "x"}}
        bodies["/v1/completions"] = {"model": "demo", "prompt": "x", "temperature": 1.0}
        for path, body in bodies.items():
            assert server.post(path, body).status_code == 200
            assert server.link.seen[-1].params.watermark_key == 12345678901, path


def test_a_late_first_token_counts_what_was_cached(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.api.generate.wire.START_SECONDS", 0.0)
    reply_with(server, CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = {"model": "demo", "messages": USER, "max_tokens": 99, "tools": [WEATHER], "tool_choice": choice}
    whole = server.post("/v1/messages", body).json()["usage"]
    text = server.post("/v1/messages", body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    first, last = ([usage[part] for part in parts] for usage in (events[0]["message"]["usage"], events[-2]["usage"]))
    assert last == [whole[part] for part in parts] and last[2] > 0
    assert first == [sum(last), 0, 0]  # a client that keeps it where `last` has a 0 counts nothing twice


def test_a_prompt_of_full_pages_has_input_tokens(server: LiveServer) -> None:
    reply_with(server, "Hi")
    for size in range(20, 20 + server.link.info.page_size):
        body = {"model": "demo", "messages": [{"role": "user", "content": "a " * size}], "max_tokens": 9}
        usage = server.post("/v1/messages", body).json()["usage"]
        assert usage["input_tokens"] > 0
        assert usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] > 0


def test_a_name_of_claude_is_the_one_served_model(
    server: LiveServer, claude: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Subagents of Claude Code ask for claude-haiku, whichever model the main conversation has."""
    reply_with(server, "Hello.")
    messages = [{"role": "user", "content": "Hi"}]
    with caplog.at_level("INFO"):
        for model in ("claude-haiku-4-5", "claude-sonnet-5"):
            assert both(claude, model=model, messages=messages).model == "demo"
            assert claude.messages.count_tokens(model=model, messages=messages).input_tokens > 0
    told = [record.getMessage() for record in caplog.records if "claude" in record.getMessage()]
    assert told == ["/v1/messages: 'claude-haiku-4-5' is answered by 'demo'"]
    for route, model in (("messages", "gpt-9"), ("messages", "xclaude-x"), ("chat/completions", "claude-haiku-4-5")):
        answer = server.http.post(f"/v1/{route}", json={"model": model, "max_tokens": 8, "messages": messages})
        assert answer.status_code == 404, (route, model)


FOUND = {"type": "tool_reference", "tool_name": "weather"}
SHOWN = '{"type": "function", "function": {"name": "weather", "description": "The weather in a city."'


def searched(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation whose model called a tool of the client's that searches for tools."""
    use = {"type": "tool_use", "id": "t0", "name": "time", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t0", "content": list(blocks)}
    return [*USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def late(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [*USER, {"role": "system", "content": [*blocks, {"type": "text", "text": "Go on."}]}]


def test_a_deferred_tool_is_shown_where_a_message_brings_it(server: LiveServer, claude: Any) -> None:
    """As Claude Code's ToolSearch does it: the tools at the head do not change, so the prefix cache finds them."""
    tools = [WEATHER | {"defer_loading": True}, TIME]
    both(claude, tools=[TIME])
    first = prompt_of(server)
    both(claude, tools=tools)
    assert prompt_of(server) == first
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "weather"}}
    inline = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": WEATHER}}
    head = first.partition("Weather in Paris?")[0]
    for offered, messages in ((tools, searched(FOUND)), (tools, late(addition)), ([TIME], late(inline))):
        reply_with(server, CALL)
        message = both(claude, tools=offered, messages=messages)
        assert [(block.type, block.name, block.input) for block in message.content] == [
            ("tool_use", "weather", {"city": "Paris"})
        ]
        prompt = prompt_of(server)
        assert prompt.startswith(head) and SHOWN in prompt.removeprefix(head) and "weather" not in head
        assert claude.beta.messages.count_tokens(model="demo", tools=offered, messages=messages).input_tokens > 100
    reply_with(server, CALL)
    assert both(claude, tools=tools).content[0].type == "text"  # it was not brought


def test_a_removed_tool_cannot_be_called(server: LiveServer, claude: Any) -> None:
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}}
    reply_with(server, CALL)
    message = both(claude, tools=[WEATHER, TIME], messages=late(removal))
    assert message.content[0].type == "text"
    prompt = prompt_of(server)
    assert SHOWN in prompt and "weather cannot be called" in prompt  # the head stays as it was
    both(claude, tools=[WEATHER], messages=late(removal), tool_choice={"type": "none"})
    with pytest.raises(anthropic.BadRequestError, match="there are no tools"):
        both(claude, tools=[WEATHER], messages=late(removal), tool_choice={"type": "any"})


def test_with_anthropics_search_no_tool_is_left_out(server: LiveServer, claude: Any) -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    both(claude, tools=[search, WEATHER | {"defer_loading": True}])
    assert SHOWN in prompt_of(server)


def test_a_tool_that_is_not_there_cannot_be_brought(claude: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"messages.2.content.0.content.0: there is no tool 'weather'"):
        both(claude, tools=[TIME], messages=searched(FOUND))
    with pytest.raises(anthropic.BadRequestError, match=r"messages.1.content.0.tool is missing"):
        both(claude, tools=[TIME], messages=late({"type": "tool_removal"}))


def test_what_anthropics_own_tools_found_is_left_out(server: LiveServer, claude: Any) -> None:
    """A conversation that began at Anthropic goes on here."""
    page = {"type": "web_search_result", "title": "Paris", "url": "https://a.example", "encrypted_content": "x"}
    fetched = {"type": "web_fetch_result", "url": "https://a.example", "content": {"type": "document", "source": {}}}
    found: list[Any] = [[page], fetched, {"type": "tool_search_tool_search_result", "tool_references": []}]
    kinds = ("web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result")
    blocks = [{"type": k, "tool_use_id": "s", "content": each} for k, each in zip(kinds, found, strict=True)]
    answer = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "It is sunny."}]}
    both(claude, messages=[*USER, answer, *USER])
    prompt = prompt_of(server)
    assert "assistant\nIt is sunny.<|im_end|>" in prompt and "a.example" not in prompt
    result = {"type": "tool_result", "tool_use_id": "t0", "content": {"a": 1}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages.1.content.0.content: an object is no list"):
        both(claude, messages=[*USER, {"role": "user", "content": [result]}])
