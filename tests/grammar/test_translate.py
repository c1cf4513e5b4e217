"""What becomes a grammar, and what is refused with its reason."""

import json
from typing import Any

import llguidance
import pytest

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.translate import MAX_SOURCE_BYTES, closed, json_schema_part, schema_spec, translate
from jaxserve.grammar.worker import build_tokenizer, compile_grammar
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import GrammarSpec


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize("kind, source, reason", [
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", "false", "no value satisfies"),
    ("json_schema", "[]", "must be an object"),
    ("json_schema", nested(65), "deeper than"),
    ("json_schema", nested(5000), "deep"),
    ("json_schema", '{"x-guidance": {"lenient": true}}', "lenient"),
    ("json_schema", '{"items": [{"x-guidance": {"lenient": 1}}]}', "lenient"),
    ("json_schema", " " * (MAX_SOURCE_BYTES + 1), "larger than"),
    ("json_schema", '{"items": {"$ref": "#/a", "$id": "x"}, "a": {}}', "drafts differ"),
    ("json_schema", '{"items": {"enum": ["a", 9007199254740993]}}', r"2\*\*53"),
    ("json_schema", '{"const": -9223372036854775807}', r"2\*\*53"),
    ("choice", "[]", "choices"),
    ("choice", "[1]", "must be a text"),
    ("choice", '"a"', "choices"),
    ("choice", json.dumps(["a"] * 5000), "choices"),
    ("ebnf", "x y z", "cannot be read"),
    ("ebnf", "root ::= undefined", "undefined"),
    ("no_such_kind", "", "no kind"),
])  # fmt: skip
def test_refused_with_a_reason(kind: str, source: str, reason: str) -> None:
    with pytest.raises(InvalidSchemaError, match=reason) as caught:
        translate(GrammarSpec(kind=kind, source=source))
    assert (caught.value.status, caught.value.code) == (400, "invalid_json_schema")


def test_strict_closes_objects() -> None:
    open_schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {}}}},
        "$defs": {"free": {"type": "object", "properties": {"x": {}}, "additionalProperties": True}},
        "default": {"properties": {}},
    }
    result = closed(open_schema)
    assert result["additionalProperties"] is False
    assert result["properties"]["a"]["items"]["additionalProperties"] is False
    assert result["$defs"]["free"]["additionalProperties"] is True
    assert result["default"] == {"properties": {}}
    assert json.loads(schema_spec(open_schema, strict=True).source) == result
    assert json.loads(schema_spec(open_schema).source) == open_schema
    with pytest.raises(InvalidSchemaError):
        closed(json.loads(nested(70)))


@pytest.mark.parametrize("name", ["default", "enum", "example", "properties"])
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    part = {"type": "object", "properties": {"a": {"pattern": r"\d"}}}
    assert closed({"properties": {name: part}})["properties"] == {name: part | {"additionalProperties": False}}
    assert "[0-9]" in json_schema_part({"properties": {name: part}})


@pytest.mark.parametrize("kind", ["regex", "lark"])
def test_half_a_character_is_refused(kind: str) -> None:
    with pytest.raises(InvalidSchemaError, match="half"):
        translate(GrammarSpec(kind=kind, source='start: "\ud800"'))


@pytest.mark.parametrize("draft", [[1, [2]], {"a": "2020-12"}, 7, None, "http://json-schema.org/draft-07/schema#"])
def test_schema_may_be_any_json(draft: Any) -> None:
    """And is looked at once, not at every object: 80,000 numbers there took half a second of Python."""

    class Counted(dict[str, Any]):
        asked = 0

        def get(self, key: str, default: Any = None) -> Any:
            self.asked += key == "$schema"
            return super().get(key, default)

    schema = Counted({"$schema": draft, "properties": {f"k{i}": {"type": "integer"} for i in range(60)}})
    json_schema_part(schema)
    assert schema.asked == 1


IDLE = [
    ({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}, '{"a": 1}', '{"a": "x"}'),
    ({"type": "object", "propertyNames": {"type": ["string", "null"], "minLength": 0}}, '{"a": 1}', "[]"),
    ({"type": "object", "propertyNames": True, "dependentRequired": {}, "dependentSchemas": {}}, "{}", "1"),
    ({"type": "object", "dependencies": {}}, "{}", "1"),
    ({"type": "array", "uniqueItems": False, "maxItems": 2**53 - 1, "unevaluatedItems": {}}, "[1, 1]", "{}"),
    ({"type": "array", "contains": {"type": "null"}, "minContains": 0}, "[1]", "{}"),
    ({"type": "array", "minContains": 1, "maxContains": 2}, "[1]", "{}"),
    ({"not": False, "unevaluatedProperties": True, "type": "object", "if": {"type": "object"}}, "{}", "1"),
    ({"type": "string", "then": {"maxLength": 1}, "else": False, "maxLength": 2**31 - 1}, '"ab"', "1"),
    ({"type": "string", "format": "path", "maxLength": 2}, '"ab"', '"abc"'),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-12", "1.5"),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "12", "-1"),
    ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028235e38}, "-1.5", '"x"'),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, "1.5", '"x"'),
]


@pytest.mark.parametrize("schema, good, bad", IDLE)
def test_keywords_that_forbid_nothing_are_no_hindrance(
    tokenizer: Tokenizer, schema: dict[str, Any], good: str, bad: str
) -> None:
    """At the top, in a property, in a definition; data and names of properties that look like them stay."""
    backend = build_tokenizer(tokenizer.to_json(), 320, list(tokenizer.eos_token_ids))
    nested = {"type": "object", "properties": {"uniqueItems": schema}, "required": ["uniqueItems"]}
    defined = {"$ref": "#/$defs/then", "$defs": {"then": schema}}
    for whole, frame in ((schema, "%s"), (nested, '{"uniqueItems": %s}'), (defined, "%s")):
        grammar = compile_grammar(backend, schema_spec(whole, strict=True))
        for text, is_good in ((good, True), (bad, False)):
            matcher = llguidance.LLMatcher(backend, grammar)
            tokens = backend.tokenize_str(frame % text)
            allowed = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
            assert (allowed and matcher.is_accepting()) == is_good, (whole, text)


@pytest.mark.parametrize("schema", [
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "null"}},
    {"not": {"type": "null"}},
    {"type": "string", "format": "uri-reference"},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"if": {"type": "string"}, "then": {"maxLength": 1}},
    {"type": "object", "unevaluatedProperties": False},
])  # fmt: skip
def test_keywords_that_forbid_something_stay_refused(tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    backend = build_tokenizer(tokenizer.to_json(), 320, list(tokenizer.eos_token_ids))
    with pytest.raises(InvalidSchemaError):
        compile_grammar(backend, schema_spec(schema))


def test_a_schema_is_closed_as_deep_as_one_may_be() -> None:
    deepest = json.loads(nested(64))
    assert closed(deepest) == deepest
    with pytest.raises(InvalidSchemaError, match="deeper than 64"):
        closed(json.loads(nested(65)))
