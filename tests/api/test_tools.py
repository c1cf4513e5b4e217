"""Tools and reasoning over the wire: streamed and whole are equal, whatever the model writes."""

import json
from typing import Any

import pytest

from .conftest import LiveServer, reply_with

MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
NOTE = {"type": "custom", "custom": {"name": "note", "description": "Write it down."}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def both(client: Any, **keys: Any) -> tuple[Any, list[Any]]:
    """An answer whole and streamed; the stream, joined, must be the same."""
    keys = {"model": "demo", "messages": MESSAGES, "max_tokens": 200} | keys
    whole = client.chat.completions.create(**keys)
    chunks = list(client.chat.completions.create(**keys, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert joined(mine) == comparable(choice.message)
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
    assert chunks[-1].usage == whole.usage
    return whole, chunks


def comparable(message: Any) -> dict[str, Any]:
    calls = [
        (call.type, call.function.name, call.function.arguments)
        if call.type == "function"
        else (call.type, call.custom.name, call.custom.input)
        for call in message.tool_calls or ()
    ]
    return {"content": message.content, "reasoning": message.reasoning_content, "calls": calls}


def joined(parts: list[Any]) -> dict[str, Any]:
    content: str | None = None
    reasoning: str | None = None
    calls: list[list[str]] = []
    for part in parts:
        delta = part.delta
        if delta.content is not None:
            content = (content or "") + delta.content
        if getattr(delta, "reasoning_content", None) is not None:
            reasoning = (reasoning or "") + delta.reasoning_content
            assert delta.reasoning == delta.reasoning_content
        for call in delta.tool_calls or ():
            body = call.function or call.model_extra["custom"]
            name = body.name if call.function else body.get("name")
            text = body.arguments if call.function else body.get("input")
            if call.id:
                assert call.index == len(calls) and text == ""
                calls.append([call.type, name, ""])
            else:
                calls[call.index][2] += text
    return {"content": content, "reasoning": reasoning, "calls": [tuple(call) for call in calls]}


def test_a_call(server: LiveServer, client: Any) -> None:
    reply_with(server, CALL)
    whole, chunks = both(client, tools=[WEATHER])
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    call = choice.message.tool_calls[0]
    assert call.id and call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    fragments = [c for c in chunks if c.choices and c.choices[0].delta.tool_calls]
    assert len(fragments) > 3  # the arguments stream
    prompt = server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids)
    assert '"name": "weather"' in prompt or '"name":"weather"' in prompt


def test_text_two_calls_and_one_only(server: LiveServer, client: Any) -> None:
    reply_with(server, f"Let me look.\n{CALL}\n{OTHER}")
    whole, _ = both(client, tools=[WEATHER, TIME])
    message = whole.choices[0].message
    assert message.content == "Let me look." and [c.function.name for c in message.tool_calls] == ["weather", "time"]
    server.link.seen.clear()
    whole, _ = both(client, tools=[WEATHER, TIME], parallel_tool_calls=False)
    message = whole.choices[0].message
    assert [c.function.name for c in message.tool_calls] == ["weather"]
    assert whole.choices[0].finish_reason == "tool_calls"
    server.wait(lambda: not server.link.running, "the rest was not aborted")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather", "argu',
        "<tool_call> no json </tool_call>",
        '{"name": 5}',
        "<tool_call>",
        "a < b",
    ],
)
def test_malformed_calls_never_raise(server: LiveServer, client: Any, text: str) -> None:
    reply_with(server, text)
    whole, _ = both(client, tools=[WEATHER])
    assert whole.choices[0].message.content or whole.choices[0].message.tool_calls


def test_without_tools_calls_are_text(server: LiveServer, client: Any) -> None:
    reply_with(server, CALL)
    for keys in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        whole, _ = both(client, **keys)
        assert whole.choices[0].message.content == CALL and whole.choices[0].finish_reason == "stop"


def test_custom_tools(server: LiveServer, client: Any) -> None:
    reply_with(server, '<tool_call>\n{"name": "note", "arguments": {"input": "a \\"b\\"\\n\\u00e9"}}\n</tool_call>')
    whole, _ = both(client, tools=[NOTE])
    call = whole.choices[0].message.tool_calls[0]
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "note", 'a "b"\né')


def test_functions_the_older_form(server: LiveServer, client: Any) -> None:
    reply_with(server, CALL)
    keys: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "functions": [WEATHER["function"]]}
    choice = client.chat.completions.create(**keys).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call.name == "weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Paris"}
    streamed = [c.choices[0].delta.function_call for c in client.chat.completions.create(**keys, stream=True)]
    assert "".join(part.arguments or "" for part in streamed if part) == choice.message.function_call.arguments


def test_reasoning(server: LiveServer, client: Any) -> None:
    reply_with(server, "<think>\nTwo and two\nis four.\n</think>\n\nIt is 4.")
    whole, _ = both(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": True})
    message = whole.choices[0].message
    assert message.reasoning_content == message.reasoning == "Two and two\nis four." and message.content == "It is 4."
    usage = whole.usage
    expected = len(server.link.tokenizer.encode("<think>\nTwo and two\nis four.\n</think>\n\n"))
    assert abs(usage.completion_tokens_details.reasoning_tokens - expected) <= 1
    whole, _ = both(client, extra_body={"separate_reasoning": False})
    assert whole.choices[0].message.content.startswith("<think>")
    assert whole.choices[0].message.reasoning_content is None
    whole, _ = both(client, extra_body={"include_reasoning": False})
    assert whole.choices[0].message.reasoning_content is None and whole.choices[0].message.content == "It is 4."
    whole, chunks = both(client, extra_body={"stream_reasoning": False})
    pieces = [c.choices[0].delta for c in chunks[:-1] if getattr(c.choices[0].delta, "reasoning_content", None)]
    assert [piece.reasoning_content for piece in pieces] == ["Two and two\nis four."]


def test_reasoning_then_a_call_with_logprobs(server: LiveServer, client: Any) -> None:
    reply_with(server, f"<think>hm</think>{CALL}")
    whole, chunks = both(client, tools=[WEATHER], logprobs=True, n=2)
    message = whole.choices[1].message
    assert message.reasoning_content == "hm" and len(message.tool_calls) == 1
    entries = whole.choices[1].logprobs.content
    assert len(entries) == whole.usage.completion_tokens / 2
    streamed = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == 1 and c.choices[0].logprobs]
    assert [entry for part in streamed for entry in part.logprobs.content] == entries


def test_no_thinking_gives_none(server: LiveServer, client: Any) -> None:
    reply_with(server, "It is 4.")
    whole, _ = both(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert whole.choices[0].message.reasoning_content is None and whole.choices[0].message.reasoning is None


def test_an_open_thought_cut_by_length(server: LiveServer, client: Any) -> None:
    reply_with(server, "<think>one two three four five six seven")
    whole, _ = both(client, max_tokens=4)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.content is None and whole.choices[0].message.reasoning_content


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools.0.function.name"),
        ({"tools": [WEATHER], "functions": [WEATHER["function"]]}, "functions"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_bad_tools(server: LiveServer, keys: dict[str, Any], param: str) -> None:
    response = server.post("/v1/chat/completions", {"model": "demo", "messages": MESSAGES} | keys)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_allowed_tools_show_only_those(server: LiveServer, client: Any) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    client.chat.completions.create(model="demo", messages=MESSAGES, tools=[WEATHER, TIME], tool_choice=choice)
    prompt = server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids)
    assert '"time"' in prompt and '"weather"' not in prompt


def grammar(server: LiveServer, **keys: Any) -> Any:
    response = server.post("/v1/chat/completions", {"model": "demo", "messages": MESSAGES} | keys)
    assert response.status_code == 200, response.text
    return server.link.seen[-1].params.grammar


def test_required_and_named_calls_are_a_grammar(server: LiveServer) -> None:
    reply_with(server, CALL)
    assert grammar(server, tools=[WEATHER]) is None  # auto, not strict: nothing to enforce
    both_tools = grammar(server, tools=[WEATHER, TIME], tool_choice="required")
    assert both_tools.kind == "lark" and "weather" in both_tools.source and "time" in both_tools.source
    named = grammar(server, tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": "time"}})
    assert "time" in named.source and "weather" not in named.source
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    assert "weather" in grammar(server, tools=[strict]).source


def test_a_json_answer_leaves_room_for_calls(server: LiveServer) -> None:
    reply_with(server, CALL)
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    spec = grammar(server, tools=[WEATHER], response_format=wanted)
    assert "jaxserve_answer" in spec.source and "weather" in spec.source
    body = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}
    response = server.post("/v1/chat/completions", body | {"response_format": wanted})
    assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"


def test_a_named_custom_tool_with_a_lark_grammar(server: LiveServer, client: Any) -> None:
    reply_with(server, "SELECT 1")
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "SELECT " /[0-9]+/'}}
    tool = {"type": "custom", "custom": {"name": "sql", "format": form}}
    whole, _ = both(client, tools=[tool], tool_choice={"type": "custom", "custom": {"name": "sql"}})
    call = whole.choices[0].message.tool_calls[0]
    assert (call.custom.name, call.custom.input) == ("sql", "SELECT 1")
    assert whole.choices[0].finish_reason == "tool_calls"


def test_schemas_of_tools_that_cannot_be_enforced(server: LiveServer) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
    body = {"model": "demo", "messages": MESSAGES, "tools": [broken], "tool_choice": "required"}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools", response.text
