"""OpenAI's Responses over a real socket, read by OpenAI's own client: streamed and whole answers are equal."""

import json
from typing import Any

import pytest

from jaxserve.config import Config
from jaxserve.types.sampling import GrammarSpec

from .conftest import LiveServer, reply_with

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": False}
TIME = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}, "strict": None}
NOTE = {"type": "custom", "name": "note", "description": "Write it down."}
SPACE = {"type": "namespace", "name": "mcp", "description": "A server.", "tools": [WEATHER, NOTE]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
USER = {"role": "user", "content": "x"}
KEYS = 32  # of a response

Json = dict[str, Any]


def both(client: Any, **keys: Any) -> Any:
    """An answer whole and streamed; the SDK's accumulator must make the same response of the stream."""
    keys = {"model": "demo", "input": "Weather in Paris?"} | keys
    whole = client.responses.create(**keys)
    events = list(client.responses.create(**keys, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert comparable(events[-1].response) == comparable(whole)
    check_items(events, whole)
    if whole.status == "completed":
        with client.responses.stream(**keys) as stream:
            assert comparable(stream.get_final_response()) == comparable(whole)
    return whole


def comparable(response: Any) -> Json:
    """A response without what differs in every answer; the SDK's accumulator adds parsed fields."""
    found = json.loads(response.model_dump_json(exclude={"id", "created_at", "completed_at"}, warnings=False))
    for item in found["output"]:
        for name in ("id", "call_id", "parsed_arguments", "encrypted_content"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return {name: value for name, value in found.items() if value is not None and name != "output_parsed"}


def check_items(events: list[Any], whole: Any) -> None:
    """Every item is added empty and done whole, with one id; its deltas join to its text."""
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] and len(done) == len(whole.output)
    assert all(item.status == "in_progress" for item in added)
    assert [item.to_dict() for item in done] == [item.to_dict() for item in events[-1].response.output]
    for item in done:
        written = "".join(e.delta for e in events if getattr(e, "item_id", "") == item.id and e.type.endswith(".delta"))
        fields = item.to_dict()
        assert written == fields.get("arguments", fields.get("input", None) or text_of(item)), item


def text_of(item: Any) -> str:
    return "".join(part.text for part in getattr(item, "content", None) or ())


def raw_events(server: LiveServer, **keys: Any) -> list[Json]:
    response = server.post("/v1/responses", {"model": "demo", "input": "Hi", "stream": True} | keys)
    blocks = [block.splitlines() for block in response.text.split("\n\n") if block]
    assert blocks.pop() == ["data: [DONE]"]
    events = []
    for name, data in (block for block in blocks if not block[0].startswith(":")):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(server: LiveServer) -> str:
    return server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids, skip_special_tokens=False)


def grammar_of(server: LiveServer) -> GrammarSpec:
    grammar = server.link.seen[-1].params.grammar
    assert grammar is not None
    return grammar


def test_text(server: LiveServer, client: Any) -> None:
    reply_with(server, "It is sunny.")
    response = both(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert (response.output_text, response.status, response.model) == ("It is sunny.", "completed", "demo")
    usage = response.usage
    assert usage.input_tokens == len(server.link.seen[-1].prompt_token_ids) and usage.output_tokens > 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert "Be brief." in prompt_of(server)
    assert (response.metadata, response.temperature, response.store) == ({"a": "b"}, 0.5, False)
    body = server.post("/v1/responses", {"model": "demo", "input": "x"}).json()
    assert len(body) == KEYS and body["id"].startswith("resp_") and body["output"][0]["id"].startswith("msg_")


def test_calls(server: LiveServer, client: Any) -> None:
    reply_with(server, f"Let me look.\n{CALL}\n{OTHER}")
    text, first, second = both(client, tools=[WEATHER, TIME]).output
    assert text.content[0].text == "Let me look." and text.status == "completed"
    assert (first.type, first.name, first.arguments) == ("function_call", "weather", '{"city": "Paris"}')
    assert (second.name, second.arguments) == ("time", "{}") and first.call_id != second.call_id
    one = both(client, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["message", "function_call"]
    server.wait(lambda: not server.link.running, "the rest was not aborted")


def test_custom_calls(server: LiveServer, client: Any) -> None:
    reply_with(server, '<tool_call>\n{"name": "note", "arguments": {"input": "a \\"b\\"\\né"}}\n</tool_call>')
    (call,) = both(client, tools=[NOTE]).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "note", 'a "b"\né')
    (call,) = both(client, tools=[NOTE], parallel_tool_calls=False).output  # the turn ends before the output
    assert call.status == "completed"
    reply_with(server, "SELECT 1")
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "SELECT " /[0-9]/'}
    choice = {"type": "custom", "name": "sql"}
    (call,) = both(client, tools=[{"type": "custom", "name": "sql", "format": form}], tool_choice=choice).output
    assert (call.name, call.input) == ("sql", "SELECT 1")
    form = {"type": "grammar", "syntax": "regex", "definition": "x+"}
    client.responses.create(model="demo", input="x", tools=[{"type": "custom", "name": "sql", "format": form}])
    assert "x+" in grammar_of(server).source


def test_namespaces(server: LiveServer, client: Any) -> None:
    """The model sees flat names; calls and their history have both parts."""
    calls = [
        CALL.replace("weather", "mcp__weather"),
        CALL.replace('"weather", "arguments": {"city"', '"mcp__note", "arguments": {"input"'),
    ]
    reply_with(server, "\n".join(calls))
    first, second = both(client, tools=[SPACE]).output
    assert (first.name, first.namespace, first.arguments) == ("weather", "mcp", '{"city": "Paris"}')
    assert (second.type, second.name, second.namespace, second.input) == ("custom_tool_call", "note", "mcp", "Paris")
    assert '"mcp__weather"' in prompt_of(server)
    reply_with(server, "ok")
    outputs = [{"type": f"{call.type}_output", "call_id": call.call_id, "output": "sun"} for call in (first, second)]
    both(client, tools=[SPACE], input=[{"role": "user", "content": "x"}, first.to_dict(), second.to_dict(), *outputs])
    prompt = prompt_of(server)
    assert prompt.count("mcp__weather") == 2 and prompt.count("<|im_start|>assistant") == 2  # one turn, and the next


def test_reasoning() -> None:
    config = Config.model_validate({"model": {"reasoning_parser": "qwen3"}})
    with LiveServer(config) as server:
        reply_with(server, f"<think>\nHm, Paris.\n</think>\n\nLet me look.\n{CALL}")
        response = both(server.client, tools=[WEATHER], reasoning={"effort": "low", "summary": "auto"})
        thought, text, call = response.output
        assert (thought.type, thought.summary, text.content[0].text) == ("reasoning", [], "Let me look.")
        assert thought.content[0].text.strip() == "Hm, Paris." and thought.encrypted_content is None
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        assert response.reasoning.effort == "low" and call.name == "weather"

        encrypted = both(server.client, include=["reasoning.encrypted_content"]).output[0]
        added = next(e for e in raw_events(server, include=["reasoning.encrypted_content"]) if "item" in e)
        assert encrypted.encrypted_content and "encrypted_content" not in added["item"]
        sent = encrypted.to_dict() | {"content": None}
        user = {"role": "user", "content": "x"}
        answered = server.post("/v1/responses", {"input": [user, sent, {"role": "assistant", "content": "y"}, user]})
        assert answered.status_code == 200
        for wrong in (encrypted.encrypted_content[:-8] + "AAAAAAAA", "gAAAA", "é", ""):
            assert (
                server.post("/v1/responses", {"input": [user, sent | {"encrypted_content": wrong}]}).status_code == 200
            )


def test_the_reasoning_of_a_conversation_reaches_the_prompt(tmp_path: Any) -> None:
    """From the text, else from the encrypted text, else from the summary; not what another key's caller was given."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content or '' }}|{{ m.content or '' }}]{% endfor %}"
    )
    config = Config.model_validate({"model": {"reasoning_parser": "qwen3", "chat_template": str(template)}})
    with LiveServer(config) as server:
        reply_with(server, "<think>secret thought</think>y")
        response = server.client.responses.create(input="x", include=["reasoning.encrypted_content"])
        encrypted = response.output[0].to_dict()
        blob = encrypted["encrypted_content"]
        summary = [{"type": "summary_text", "text": "the summary"}]
        other = server.app.state.server.encryption.encrypt("foreign thought", "demo", "another key")
        table = {
            "secret thought": encrypted,
            "encrypted": encrypted | {"content": None, "encrypted_content": blob},
            "the summary": {"type": "reasoning", "summary": summary, "encrypted_content": "from-elsewhere"},
            "": {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": other},
        }
        table["secret thought"], shown = table.pop("encrypted"), "secret thought"
        for text, item in table.items():
            items = [{"role": "user", "content": "x"}, item, {"role": "assistant", "content": "y"}]
            server.client.responses.create(input=[*items, {"role": "user", "content": "z"}])
            assert f"[assistant:{text}|y]" in prompt_of(server), (text, shown)


def test_log_probabilities(server: LiveServer, client: Any) -> None:
    reply_with(server, f"It is sunny.{CALL}")
    keys: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [WEATHER]}
    part = both(client, **keys).output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 and entry.bytes for entry in part.logprobs)
    events = raw_events(server, **keys)
    told = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert [entry["token"] for entry in told] == [entry.token for entry in part.logprobs]
    assert all("bytes" not in entry and "bytes" not in entry["top_logprobs"][0] for entry in told)
    assert both(client, top_logprobs=2).output[0].content[0].logprobs == []


def test_text_formats(server: LiveServer, client: Any) -> None:
    reply_with(server, '{"city": "Paris"}')
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA | {"additionalProperties": False}, "strict": True}
    response = both(client, text={"format": form, "verbosity": "low"})
    assert json.loads(response.output_text) == {"city": "Paris"}
    assert grammar_of(server).kind == "json_schema"
    assert response.text.format.schema_ == form["schema"] and response.text.verbosity == "low"
    both(client, text={"format": {"type": "json_object"}})
    assert grammar_of(server).kind == "json_object"
    body = {"input": "x", "structured_outputs": {"regex": "a+"}, "text": {"format": {"type": "text"}}}
    assert server.post("/v1/responses", body).status_code == 200
    assert grammar_of(server).kind == "regex"


def test_what_ends_an_answer(server: LiveServer, client: Any) -> None:
    reply_with(server, "one two three")
    cut = both(client, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[-1].status == "incomplete" and cut.completed_at is None
    stopped = both(client, extra_body={"stop": ["two"]})
    assert (stopped.status, stopped.output_text) == ("completed", "one ")
    assert stopped.output[-1].status == "completed"
    reply_with(server, CALL)
    stopped = both(client, tools=[WEATHER], extra_body={"stop": ["Par"]})
    assert (stopped.output[0].type, stopped.output[0].status) == ("function_call", "incomplete")
    cut = both(client, tools=[WEATHER], max_output_tokens=20)
    assert (cut.status, cut.output[0].type, cut.output[0].status) == ("incomplete", "function_call", "incomplete")
    reply_with(server, "")
    assert [part.text for part in both(client).output[0].content] == [""]


@pytest.mark.parametrize("wish", [{"prompt_cache_options": {"prewarm": True, "ttl": "30m"}}, {"generate": False}])
def test_a_response_without_output_fills_the_prefix_cache(server: LiveServer, client: Any, wish: Json) -> None:
    for said in ("one two", ""):  # the engine samples a token, also the end, which is dropped
        reply_with(server, said)
        response = both(client, max_output_tokens=50, extra_body=wish)
        assert (response.status, response.output, response.usage.output_tokens) == ("completed", [], 0)
        assert server.link.seen[-1].params.max_tokens == 1


def test_the_choice_of_tools(server: LiveServer, client: Any) -> None:
    reply_with(server, "fine")
    keys: Json = {"tools": [WEATHER, TIME, SPACE, {"type": "web_search", "external_web_access": True}]}
    both(client, **keys)
    prompt = server.link.seen[-1].prompt_token_ids
    assert "web_search" not in prompt_of(server)
    table: list[tuple[Any, set[str]]] = [
        ("none", set()),
        ({"type": "function", "name": "time"}, {"time"}),
        ({"type": "custom", "name": "note", "namespace": "mcp"}, {"mcp__note"}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [TIME, {"type": "web_search"}]}, {"time"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp"}]},
            {"mcp__weather", "mcp__note"},
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "mcp__weather"}]},
            {"mcp__weather"},
        ),
        ("required", {"weather", "time", "mcp__weather", "mcp__note"}),
    ]
    for choice, names in table:
        assert (
            server.post("/v1/responses", {"input": "Weather in Paris?", "tool_choice": choice} | keys).status_code
            == 200
        )
        params = server.link.seen[-1]
        assert params.prompt_token_ids == prompt and params.params.grammar is not None
        source = params.params.grammar.source
        found = {name for name in ("weather", "time", "mcp__weather", "mcp__note") if f'\\"{name}\\"' in source}
        assert found == names, choice


def test_a_conversation_of_items(server: LiveServer, client: Any) -> None:
    """Items without ids, a null content, outputs in parts, hosted calls, an image, a late developer message."""
    reply_with(server, "Done.")
    items: list[Json] = [
        {"role": "developer", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAAB"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "auto"}]},
        {"role": "user", "content": "And now?", "phase": "x"},
    ]
    both(client, input=items, instructions="Be brief.", tools=[WEATHER, TIME])
    prompt = prompt_of(server)
    shown = [
        "Be brief.",
        "You are an agent.",
        "Hello",
        "I look.",
        '"city"',
        "sunny",
        "noon",
        "image was here",
        "And now?",
    ]
    places = [prompt.rindex(text) for text in shown]
    assert places == sorted(places) and prompt.count("<|im_start|>assistant") == 2
    assert prompt.count("<|im_start|>system") == 1


def test_an_empty_input(server: LiveServer, client: Any) -> None:
    """Codex probes a server with it."""
    reply_with(server, "fine")
    for keys in ({"input": []}, {"input": ""}, {"input": [], "instructions": "x"}):
        both(client, **keys, max_output_tokens=1)


def test_the_same_conversation_gives_the_same_prompt_on_every_route(server: LiveServer, client: Any) -> None:
    reply_with(server, "x")
    arguments = '{"city": "Paris"}'
    function = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": function}]
    client.chat.completions.create(model="demo", max_tokens=1, messages=chat, tools=tools)
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}
    blocks = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
    ]
    own = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    body: Json = {"model": "demo", "max_tokens": 1, "messages": blocks, "system": "Be brief.", "tools": [own]}
    assert server.post("/v1/messages", body).status_code == 200
    items = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    keys: Json = {"model": "demo", "input": items, "instructions": "Be brief.", "tools": [WEATHER]}
    client.responses.create(**keys, max_output_tokens=1)
    prompts = [seen.prompt_token_ids for seen in server.link.seen[-3:]]
    assert prompts[0] == prompts[2]
    assert [text.replace(" ", "") for text in map(server.link.tokenizer.decode, prompts)] == [
        server.link.tokenizer.decode(prompts[0]).replace(" ", "")
    ] * 3  # Messages sends arguments as an object, whose spaces are the server's
    assert client.responses.input_tokens.count(**keys).input_tokens == len(prompts[2])


def test_truncation(server: LiveServer, client: Any) -> None:
    """Whole turns are left out, the oldest first; instructions stay."""
    reply_with(server, "fine")
    items: list[Json] = [{"role": "developer", "content": "The rules."}]
    for number in range(12):
        call = {"call_id": f"c{number}", "name": "weather", "arguments": "{}"}
        items += [
            {"role": "user", "content": f"question {number} " + "word " * 30},
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"result {number}!"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    items.append({"role": "user", "content": "the last question"})
    body: Json = {"input": items, "instructions": "Be brief.", "max_output_tokens": 9}
    refused = server.post("/v1/responses", body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    answered = server.post("/v1/responses", body | {"truncation": "auto"})
    assert answered.status_code == 200 and answered.json()["truncation"] == "auto"
    prompt = prompt_of(server)
    assert "Be brief." in prompt and "The rules." in prompt and "the last question" in prompt
    kept = [number for number in range(12) if f"question {number} " in prompt]
    assert kept == list(range(kept[0], 12)) and 0 < kept[0] < 12
    assert [number for number in range(12) if f"result {number}!" in prompt] == kept
    alone = {"input": "word " * 2000, "truncation": "auto"}
    assert server.post("/v1/responses", alone).json()["error"]["code"] == "context_length_exceeded"


def test_a_call_that_is_cut_before_its_arguments_is_not_whole(server: LiveServer, client: Any) -> None:
    reply_with(server, CALL)
    (item,) = both(client, tools=[WEATHER], extra_body={"stop": "arguments"}).output
    assert (item.arguments, item.status) == ("", "incomplete")
