"""What becomes a grammar, and what is refused with its reason."""

import json
from typing import Any

import pytest

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.translate import MAX_SOURCE_BYTES, closed, json_schema_part, schema_spec, translate
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
