"""Tools over the wire: streamed and whole are equal, whatever the model writes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import Config
from tests.scrape import values
from tests.waiting import wait_until

from .conftest import LiveServer, reply_with

MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
NOTE = {"type": "custom", "custom": {"name": "note", "description": "Write it down."}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALLED = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
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
        if delta.reasoning_content is not None:  # an AttributeError where a delta lacks it
            reasoning = (reasoning or "") + delta.reasoning_content
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


def test_the_format_of_calls_is_that_of_the_template_for_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hermes 2 Pro's: the default template says nothing of calls, which were left in the text."""
    with LiveServer() as server:
        tokenizer = server.engine.tokenizer
        for_tools = tokenizer.chat_templates["default"]
        default = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        monkeypatch.setattr(tokenizer, "chat_templates", {"default": default, "tool_use": for_tools})
        reply_with(server, CALL)
        body = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER]}
        for choice in ("auto", "required"):
            answer = server.post("/v1/chat/completions", body | {"tool_choice": choice}).json()["choices"][0]
            assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather", answer
        grammar = server.link.seen[-1].params.grammar
        assert grammar is not None and f"<[{tokenizer.backend.token_to_id('<tool_call>')}]>" in grammar.source


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


@pytest.mark.parametrize("answer", ["It is déf.", CALL])
def test_the_tokens_of_the_reasoning_are_not_those_of_a_group(server: LiveServer, client: Any, answer: str) -> None:
    reply_with(server, f"<think>\nabc déf\n</think>\n\n{answer}")
    counts = []
    for interval in (1, 3, 100):
        whole, _ = both(client, tools=[WEATHER], extra_body={"stream_interval": interval})
        counts.append(whole.usage.completion_tokens_details.reasoning_tokens)
    encode = server.link.tokenizer.encode
    least, most = len(encode("<think>\nabc déf")), len(encode("<think>\nabc déf\n</think>\n\n"))
    assert least <= counts[2] <= most and counts[2] <= counts[1] + 3 <= counts[0] + 6, counts


def test_the_head_of_a_call_is_no_reasoning(server: LiveServer, client: Any) -> None:
    reply_with(server, f"<think>\nabc\n</think>\n\n{CALL}")
    whole, _ = both(client, tools=[WEATHER])
    expected = len(server.link.tokenizer.encode("<think>\nabc\n</think>\n\n"))
    assert whole.choices[0].message.tool_calls
    assert whole.usage.completion_tokens_details.reasoning_tokens == expected


def test_a_choice_that_has_ended_is_computed_no_further(server: LiveServer, client: Any) -> None:
    """The others go on: here the second choice has no call and is long."""
    served = server.link
    served.script = lambda prompt, params: CALL + " x" * 100 if params.seed == 5 else " a" * 150
    served.delay = 0.002
    keys = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER], "parallel_tool_calls": False, "n": 2, "seed": 5}
    whole = client.chat.completions.create(**keys, max_tokens=300)
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "stop"]
    assert len(served.aborted) == 1
    assert whole.usage.completion_tokens < len(served.tokenizer.encode(CALL + " a" * 150)) + 100


def test_an_output_that_ends_after_its_call_counts_its_cached_tokens(server: LiveServer, client: Any) -> None:
    reply_with(server, CALL)
    many = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=200, tools=[WEATHER])
    whole, _ = both(client, tools=[WEATHER], parallel_tool_calls=False)
    assert whole.usage.prompt_tokens_details == many.usage.prompt_tokens_details
    assert whole.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather", "argu',
        "<tool_call> no json </tool_call>",
        '{"name": 5}',
        "Then <tool_call>",
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


def test_calls_come_back_with_their_results(server: LiveServer) -> None:
    """Of custom tools, in the older form, and with results in another order than the calls."""
    custom = {"id": "1", "type": "custom", "custom": {"name": "note", "input": 'a "b"'}}
    function = {"id": "2", "type": "function", "function": {"name": "time", "arguments": None}}
    results = [{"role": "tool", "tool_call_id": each, "content": f"result {each}"} for each in "21"]
    older = [
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    both = {"role": "assistant", "tool_calls": [custom, function], "function_call": {"name": "note"}}
    for messages, shown in (
        ([both, *results], ["note", "a .*b", "time", "result 1", "result 2"]),
        (
            [both, *results[1:], {"role": "user", "content": "more"}, results[0] | {"tool_call_id": "3"}],
            ["result 1", "more", "result 2"],
        ),
        ([{"role": "assistant", "function_call": {"name": "time"}}, *older[1:]], ["time", '"arguments": {}', "sunny"]),
        (older, ["weather", "Rome", "tool_response", "sunny"]),
    ):
        body = {"model": "demo", "messages": [*MESSAGES, *messages], "return_prompt_text": True}
        prompt = server.post("/v1/chat/completions", body).json()["prompt_text"]
        assert re.search(".*".join(shown), prompt, re.DOTALL), prompt
    broken = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}
    response = server.post("/v1/chat/completions", {"model": "demo", "messages": [*MESSAGES, broken]})
    assert response.json()["error"]["param"] == "messages.1.tool_calls.0.function"


def test_functions_the_older_form(server: LiveServer, client: Any) -> None:
    reply_with(server, CALL)
    keys: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "functions": [WEATHER["function"]]}
    choice = client.chat.completions.create(**keys).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call.name == "weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Paris"}
    streamed = [c.choices[0].delta.function_call for c in client.chat.completions.create(**keys, stream=True)]
    assert "".join(part.arguments or "" for part in streamed if part) == choice.message.function_call.arguments


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools.0.function.name"),
        ({"tools": [WEATHER], "functions": [WEATHER["function"]]}, "functions"),
        ({"tools": [WEATHER, {"type": "custom", "custom": {"name": "weather"}}]}, "tools.1"),
        ({"tools": [TIME, WEATHER, {"type": "function", "function": {"name": "weather"}}]}, "tools.2"),
        ({"tools": [NOTE], "tool_choice": {"type": "function", "function": {"name": "note"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "function_call": {"name": "weather"}}, "function_call"),
        ({"tools": [WEATHER], "function_call": "none"}, "function_call"),
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"functions": [WEATHER["function"]], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [WEATHER["function"]], "tool_choice": "none"}, "tool_choice"),
    ],
)
def test_bad_tools(server: LiveServer, keys: dict[str, Any], param: str) -> None:
    response = server.post("/v1/chat/completions", {"model": "demo", "messages": MESSAGES} | keys)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


ALLOWED_TIME = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]},
}
NAMED_TIME = {"type": "function", "function": {"name": "time"}}


def test_the_prompt_does_not_depend_on_the_choice(server: LiveServer) -> None:
    """So that requests with different choices share its prefix; the grammar limits the calls."""
    reply_with(server, "fine")
    grammar(server, tools=[WEATHER, TIME])
    prompt = server.link.seen[-1].prompt_token_ids
    for choice in ("none", ALLOWED_TIME, NAMED_TIME):
        limits = grammar(server, tools=[WEATHER, TIME], tool_choice=choice)
        assert server.link.seen[-1].prompt_token_ids == prompt
        assert limits is not None and "weather" not in limits.source
        assert ("time" in limits.source) == (choice != "none")
    body = {"tools": [WEATHER, TIME], "tool_choice": "none", "use_beam_search": True, "temperature": 0}
    assert grammar(server, **body) is None  # a beam search takes no grammar


def test_as_many_tools_and_as_long_names_as_agents_bring(server: LiveServer) -> None:
    def answer(count: int, length: int) -> Any:
        tools = [{"type": "function", "function": {"name": f"{i}".zfill(length)}} for i in range(count)]
        reply_with(server, f'<tool_call>{{"name": "{"0" * length}", "arguments": {{}}}}</tool_call>')
        body = {"model": "demo", "messages": [], "input_ids": [5], "tools": tools}  # rendered they fill the context
        return server.post("/v1/chat/completions", body)

    for count, length in ((1024, 8), (2, 128)):
        called = answer(count, length).json()["choices"][0]["message"]["tool_calls"]
        assert called[0]["function"]["name"] == "0" * length
    assert answer(1025, 8).json()["error"]["param"] == "tools"
    assert answer(1, 129).json()["error"]["param"] == "tools.0.function.name"


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


def test_a_tool_that_is_not_strict_is_never_refused_for_its_schema(server: LiveServer) -> None:
    reply_with(server, CALL)
    deep: dict[str, Any] = {"type": "any"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}, "required": None}
    function = {"name": "odd", "parameters": deep | {"required": ["a"]}}
    tools = [{"type": "function", "function": function}, WEATHER]
    spec = grammar(server, input_ids=[5], tools=tools, tool_choice="required")  # rendered they fill the context
    assert '"properties": {"a": {"type": "object"}}, "required": ["a"]' in spec.source
    function["strict"] = True
    refused = server.post("/v1/chat/completions", {"model": "demo", "messages": [], "input_ids": [5], "tools": tools})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"


def test_a_json_answer_leaves_room_for_calls(server: LiveServer) -> None:
    reply_with(server, CALL)
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    spec = grammar(server, tools=[WEATHER], response_format=wanted)
    assert '"city"' in spec.source.replace("weather", "") and "weather" in spec.source
    calls_only = grammar(server, tools=[WEATHER], tool_choice="required")
    assert spec.source != calls_only.source


NAMED_WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED_WEATHER])
def test_a_format_of_the_answer_beside_a_required_call(server: LiveServer, client: Any, choice: Any) -> None:
    """The calls follow the tools' schemas; there is no text answer that the format could be of."""
    reply_with(server, CALL)
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 5}}}
    keys = {"tools": [WEATHER, TIME], "tool_choice": choice}
    with_format = grammar(server, **keys, response_format=wanted)
    assert with_format == grammar(server, **keys) and with_format is not None
    whole, _ = both(client, **keys, response_format=wanted)
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["weather"]
    refused = server.post("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "regex": "a+"} | keys)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"


def test_a_named_tool_is_called_exactly_once(server: LiveServer, client: Any) -> None:
    reply_with(server, CALL + "\n" + CALL)
    whole, _ = both(client, tools=[WEATHER, TIME], tool_choice=NAMED_WEATHER, parallel_tool_calls=True)
    assert len(whole.choices[0].message.tool_calls) == 1 and whole.choices[0].finish_reason == "tool_calls"
    once = grammar(server, tools=[WEATHER], tool_choice=NAMED_WEATHER)
    many = grammar(server, tools=[WEATHER], tool_choice="required")
    assert "{0,63}" in many.source and "{0,63}" not in once.source
    both(client, tools=[WEATHER], tool_choice="required")


def test_a_call_of_a_tool_that_is_not_offered_is_text(server: LiveServer, client: Any) -> None:
    def counted() -> float:
        return values(server.http.get("/metrics").text)["jaxserve:unoffered_tool_calls_total"]

    before = counted()
    reply_with(server, CALL)
    whole, _ = both(client, tools=[TIME])
    assert whole.choices[0].message.content == CALL and not whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "stop" and counted() == before + 2  # whole and streamed
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    reply_with(server, f"{OTHER}\n{CALL}")
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    whole, _ = both(client, tools=[WEATHER, TIME], tool_choice=choice)
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["time"]
    assert whole.choices[0].message.content == CALL


def test_a_call_that_a_stop_string_cuts_is_not_one_to_run(server: LiveServer, client: Any) -> None:
    reply_with(server, CALL)
    for stop, reason in (("Paris", "stop"), ("</tool", "tool_calls"), ("Rome", "tool_calls")):
        whole, _ = both(client, tools=[WEATHER], stop=[stop])
        assert whole.choices[0].finish_reason == reason
        assert len(whole.choices[0].message.tool_calls) == 1


def test_the_head_of_a_call_that_was_cut_off_is_no_content(server: LiveServer, client: Any) -> None:
    reply_with(server, f'{CALL}\n<tool_call>\n{{"name": "weather", "arguments": {{}}}}')
    tokens = len(server.link.tokenizer.encode(CALL))
    for more in range(8):
        whole, _ = both(client, tools=[WEATHER], max_tokens=tokens + more)
        message = whole.choices[0].message
        assert message.content is None and message.tool_calls[0].function.arguments == '{"city": "Paris"}', more


@pytest.mark.parametrize(
    "parser, call",
    [
        ("harmony", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>"),
        ("muse_glimmer", ' to=weather<|message|><atem:invoke name="weather"></atem:invoke><|eot|>'),
    ],
)
def test_a_grammar_of_channels_holds_from_the_first_token(parser: str, call: str) -> None:
    """Its channels are in the grammar. Begun after the final channel's header it would allow any answer instead."""
    with LiveServer(Config().replace(model={"tool_parser": parser})) as server:
        reply_with(server, call)
        assert grammar(server, tools=[WEATHER], tool_choice="required").begin_after == ()
        wanted = {"type": "json_object"}
        assert grammar(server, tools=[WEATHER], response_format=wanted).begin_after == ()
        assert grammar(server, response_format=wanted).begin_after != ()
        begun = {"messages": [*MESSAGES, {"role": "assistant", "content": '{"a'}], "continue_final_message": True}
        assert grammar(server, response_format=wanted, **begun).begin_after == ()


def test_a_named_custom_tool_with_a_lark_grammar(server: LiveServer, client: Any) -> None:
    reply_with(server, "SELECT 1")
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "SELECT " /[0-9]+/'}}
    tool = {"type": "custom", "custom": {"name": "sql", "format": form}}
    whole, _ = both(client, tools=[tool], tool_choice={"type": "custom", "custom": {"name": "sql"}})
    call = whole.choices[0].message.tool_calls[0]
    assert (call.custom.name, call.custom.input) == ("sql", "SELECT 1")
    assert whole.choices[0].finish_reason == "tool_calls"


def test_schemas_of_tools_that_cannot_be_enforced(server: LiveServer) -> None:
    """Of a tool that is not strict the rest is enforced, also beside a strict tool."""
    function = {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}
    beside = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    for strict, status in ((True, 400), (False, 200)):
        broken = {"type": "function", "function": function | {"strict": strict}}
        for keys in ({"tools": [broken], "tool_choice": "required"}, {"tools": [beside, broken]}):
            response = server.post("/v1/chat/completions", {"model": "demo", "messages": MESSAGES} | keys)
            assert response.status_code == status, response.text
            if status == 400:
                error = response.json()["error"]
                assert error["param"] == "tools" and error["message"].startswith("tool 'f': "), error


def test_no_chunk_of_a_stream_has_empty_content_behind_the_first(server: LiveServer, client: Any) -> None:
    """A call of a tool that was not offered ends as text, of which nothing may be left at the end."""
    reply_with(server, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    for tools in ([NOTE], [WEATHER]):
        chunks = list(client.chat.completions.create(model="demo", messages=MESSAGES, tools=tools, stream=True))
        contents = [chunk.choices[0].delta.content for chunk in chunks]
        assert "" not in contents[1:]


STRICT = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content + '' }}{% for c in m.tool_calls %}<tool_call>
{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}{{ c.id }} {{ c.function.name }}
{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}
{% endfor %}</tool_call>{% endfor %}
{% if m.role == 'tool' -%}
{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ m.tool_call_id }}
{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def test_histories_with_odd_arguments_and_ids_render_on_every_route(tmp_path: Path) -> None:
    """With a template that walks through arguments, adds to contents and takes ids of nine characters only."""
    prompts: dict[str, list[str]] = {}
    lines: dict[str, list[bytes]] = {"/v1/chat/completions": [], "/v1/responses": []}
    with LiveServer(Config().replace(model={"chat_template": STRICT}), store=tmp_path) as server:
        reply_with(server, "Fine.")

        def ask(path: str, body: dict[str, Any]) -> None:
            if path in lines:
                line = {"custom_id": str(len(lines[path])), "method": "POST", "url": path}
                lines[path].append(json.dumps(line | {"body": {"model": "demo"} | body}).encode())
            answer = server.post(path, {"model": "demo", "stream": False} | body)
            assert answer.status_code == 200, (path, answer.text)
            prompts.setdefault(path, []).append(server.engine.tokenizer.decode(server.link.seen[-1].prompt_token_ids))

        user, result = MESSAGES[0], "It rains."
        for given in ("", "null", "[1]", '{"city": "Pa', '{"city": "a"}{"city": "b"}', '{"city": "Paris"}'):
            for call_id in ("toolu_1", "call_0123456789abcdef", "0"):
                function = {"name": "weather", "arguments": given}
                called = {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [CALLED | {"id": call_id, "function": function}],
                }
                told = {"role": "tool", "tool_call_id": call_id, "content": result}
                ask("/v1/chat/completions", {"messages": [user, called, told]})
                item = {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": given}
                output = {"type": "function_call_output", "call_id": call_id, "output": result}
                ask("/v1/responses", {"input": [user, item, output]})
                input = (
                    {"city": "Paris"} if "Paris" in given else {} if given in ("", "null") else {"INVALID_JSON": given}
                )
                use = {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": call_id, "name": "weather", "input": input}],
                }
                block = {"type": "tool_result", "tool_use_id": call_id, "content": result}
                ask("/v1/messages", {"max_tokens": 20, "messages": [user, use, {"role": "user", "content": [block]}]})
                function = {"name": "weather", "arguments": input}
                messages = [user, {"role": "assistant", "tool_calls": [{"function": function}]}]
                ask("/api/chat", {"messages": [*messages, {"role": "tool", "tool_name": "weather", "content": result}]})
        assert prompts["/v1/chat/completions"] == prompts["/v1/responses"] == prompts["/v1/messages"]
        for path in lines:
            seen = len(server.link.seen)
            counts = run_batch(server, path, lines[path])
            assert (counts["completed"], counts["failed"]) == (len(lines[path]), 0)
            found = [server.engine.tokenizer.decode(each.prompt_token_ids) for each in server.link.seen[seen:]]
            assert sorted(found) == sorted(prompts[path])
        without_ids = [[re.sub(r"\b[0-9a-f]{9}\b", "ID", text) for text in each] for each in prompts.values()]
        assert without_ids[0] == without_ids[-1] and all("ID weather" in text for text in without_ids[0])


def run_batch(server: LiveServer, endpoint: str, lines: list[bytes]) -> dict[str, int]:
    """The counts of a batch of these lines, once it has ended."""
    files = {"file": ("in.jsonl", b"\n".join(lines))}
    file = server.http.post("/v1/files", files=files, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch = server.http.post("/v1/batches", json=body).json()

    def look() -> dict[str, Any]:
        return server.http.get(f"/v1/batches/{batch['id']}").json()

    wait_until(lambda: look()["status"] in ("completed", "failed", "expired"), "the batch has ended")
    return look()["request_counts"]


def test_a_call_that_max_tokens_cut_can_be_sent_back() -> None:
    with LiveServer(Config().replace(model={"chat_template": STRICT, "tool_parser": "hermes"})) as server:
        reply_with(server, CALL)
        body = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER]}
        cut = 0
        for length in range(1, 80):
            message = server.post("/v1/chat/completions", body | {"max_tokens": length}).json()["choices"][0]["message"]
            told = [
                {"role": "tool", "tool_call_id": each["id"], "content": "?"} for each in message.get("tool_calls") or ()
            ]
            again = server.post("/v1/chat/completions", body | {"messages": [*MESSAGES, message, *told]})
            assert again.status_code == 200, (message, again.text)
            cut += any(not each["function"]["arguments"].endswith("}") for each in message.get("tool_calls") or ())
        assert cut
