"""Constraints: every spelling becomes one grammar; what cannot be enforced is a 400 that names its field."""

import json
import random
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from jaxserve.grammar.matcher import MatcherFactory

from .conftest import LiveServer, reply_with

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
MESSAGES = [{"role": "user", "content": "Hi"}]
NAMELESS = {"type": "json_schema", "json_schema": {"name": "a"}}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def grammar_of(server: LiveServer, keys: dict[str, Any], path: str = "/v1/completions") -> Any:
    body = {"model": "demo", "prompt": "x", "messages": MESSAGES, "text": "x"}
    body = body | (keys if path != "/generate" else {"sampling_params": keys})
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return server.link.seen[-1].params.grammar


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": NAMED}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema"),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "json_object"),
        ({"response_format": NAMED | {"type": "json_object"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "value": SCHEMA}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": False}}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "ebnf"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "lark"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
        ({"regex": "[0-9]+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"guided_json": SCHEMA}, "json_schema"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema"),
        ({"guided_regex": "[0-9]+"}, "regex"),
        ({"guided_choice": ["yes", "no"]}, "choice"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf"),
    ],
)
def test_every_spelling(server: LiveServer, keys: dict[str, Any], kind: str) -> None:
    spec = grammar_of(server, keys)
    assert spec.kind == kind
    if kind == "json_schema":
        assert json.loads(spec.source)["properties"] == SCHEMA["properties"]
    assert grammar_of(server, keys, "/v1/chat/completions").kind == kind
    if keys.keys() & {"json_schema", "regex", "ebnf"}:
        assert grammar_of(server, keys, "/generate").kind == kind


def test_no_constraint(server: LiveServer) -> None:
    assert grammar_of(server, {}) is None
    assert grammar_of(server, {"response_format": {"type": "text"}}) is None


def test_strict_closes_objects(server: LiveServer) -> None:
    strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    flat = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    for wanted in (strict, flat):
        assert json.loads(grammar_of(server, {"response_format": wanted}).source)["additionalProperties"] is False
    assert "additionalProperties" not in json.loads(grammar_of(server, {"response_format": NAMED}).source)


def test_structural_tags(server: LiveServer) -> None:
    older = {"triggers": ["<f="], "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}]}
    newer = {"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}
    for tag in (older, newer):
        assert grammar_of(server, {"response_format": {"type": "structural_tag"} | tag}).kind == "lark"
        assert grammar_of(server, {"structural_tag": json.dumps(tag)}, "/generate").kind == "lark"


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": NAMELESS}, "response_format.json_schema.schema"),
        ({"response_format": NAMED | {"schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}}, "response_format.value"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": NAMED, "regex": "a"}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"not": {"type": "string"}}}}, "structured_outputs"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"json_schema": {"type": "object", "if": {"type": "null"}, "then": {"const": 1}}}, "json_schema"),
    ],
)
def test_what_cannot_be_enforced(server: LiveServer, keys: dict[str, Any], param: str) -> None:
    response = server.post("/v1/completions", {"model": "demo", "prompt": "x"} | keys)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_schema_is_named_by_its_own_field(server: LiveServer) -> None:
    """A tool's was named response_format, and so was that of an answer beside tools."""
    rounded = {"type": "object", "properties": {"a": {"const": 2**60}}}
    chat = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    functions = ({"name": "f", "parameters": SCHEMA}, {"name": "f", "parameters": rounded, "strict": True})
    good, bad = ([{"type": "function", "function": function}] for function in functions)
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": rounded}}
    cases = [({"tools": bad, "tool_choice": "required"}, "tools"), ({"tools": bad, "response_format": answer}, "tools")]
    cases += [
        ({"tools": good, "response_format": wrong}, "response_format"),
        ({"tools": good, "guided_json": rounded}, "guided_json"),
    ]
    for keys, param in cases:
        error = server.post("/v1/chat/completions", chat | keys).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_json_schema", param)


def test_parse_helper(server: LiveServer, client: Any) -> None:
    class Point(BaseModel):
        x: int
        label: str | None = None

    reply_with(server, '{"x": 3, "label": "a"}')
    answer = client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Point)
    assert answer.choices[0].message.parsed == Point(x=3, label="a")
    with client.chat.completions.stream(model="demo", messages=MESSAGES, response_format=Point) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Point(x=3, label="a")


def test_the_grammar_begins_after_the_reasoning(server: LiveServer) -> None:
    encode = server.link.tokenizer.encode
    keys: dict[str, Any] = {"response_format": NAMED}
    path = "/v1/chat/completions"
    may_think = grammar_of(server, keys | {"chat_template_kwargs": {"enable_thinking": True}}, path)
    assert may_think.begin_after == tuple(encode("</think>")) and may_think.begin_unless == tuple(encode("<think>"))
    assert grammar_of(server, keys, path).begin_after == ()  # the demo's template does not think by default
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert grammar_of(server, keys | off, path).begin_after == ()
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>so far"}]
    inside = grammar_of(server, keys | {"messages": messages, "continue_final_message": True}, path)
    assert inside.begin_after and not inside.begin_unless
    assert grammar_of(server, keys).begin_after == ()  # completions know no reasoning


def test_a_required_call_can_be_written_in_the_tokens_of_the_model(server: LiveServer) -> None:
    """The grammar of a call, sampled at random: what comes out is a call, and the parser reads it."""
    tokenizer, info = server.link.tokenizer, server.link.info
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA | {"additionalProperties": False}}}
    keys = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    spec = grammar_of(server, keys, "/v1/chat/completions")
    factory = MatcherFactory(tokenizer.to_json(), vocab_size=info.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    for seed in range(5):
        token_ids = _sampled(factory(spec), info.vocab_size, random.Random(seed), tokenizer.eos_token_ids)
        reply_with(server, token_ids)
        body = {"model": "demo", "messages": MESSAGES, "max_tokens": 400} | keys
        choice = server.post("/v1/chat/completions", body).json()["choices"][0]
        call = choice["message"]["tool_calls"][0]["function"]
        assert call["name"] == "weather" and set(json.loads(call["arguments"])) == {"x"}, choice


def _sampled(matcher: Any, vocab_size: int, rng: random.Random, ends: tuple[int, ...]) -> list[int]:
    """Tokens that the grammar allows, preferring those that end something."""
    token_ids: list[int] = []
    while len(token_ids) < 300 and not matcher.is_terminated:
        row = np.full(-(-vocab_size // 32), -1, np.int32)
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size])
        closing = [i for i in ends if i in allowed]
        token_id = closing[0] if closing else int(rng.choice(list(allowed)))
        if closing:
            return token_ids
        assert matcher.accept(token_id), matcher.error
        token_ids.append(token_id)
    return token_ids
