"""Parameters that a format of calls writes one by one: what the grammar allows is read back as the schema says."""

import json
import random
import time
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.matcher import MatcherFactory
from jaxserve.grammar.tools import CallModel, GrammarTool, tool_grammar
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tools import ToolSet
from jaxserve.text.tools.registry import TOOL_FORMATS
from jaxserve.types.sampling import GrammarSpec
from tests.grammar.test_grammar_tools import grammar, sample
from tests.grammar.test_matcher import feed
from tests.text.whole_outputs import parse_whole

ONE_BY_ONE = ["qwen3_coder", "glm45", "deepseek_v32", "pythonic"]
NULL = {"type": "null"}
VALUES = [
    {"type": ["string", "null"]},
    {"type": ["string"], "enum": ["a", ""]},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"enum": ["a", "b"]},
    {"const": "a"},
    {"anyOf": [{"const": "a"}, {"type": "string", "enum": ["b"]}]},
    {"anyOf": [{"type": "string", "enum": ["ab"]}, NULL]},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "maxLength": 1}, "maxItems": 1}]},
    {"type": ["string", "integer"], "enum": ["1", 2]},
    {"type": "boolean"},
]


def one(schema: dict[str, Any]) -> GrammarTool:
    return GrammarTool("f", {"type": "object", "properties": {"x": schema}, "required": ["x"]})


def spec_of(family: str, tool: GrammarTool) -> GrammarSpec:
    spec = tool_grammar(CallModel(family), [tool], required=True, parallel=False)
    assert spec is not None
    return spec


@pytest.mark.parametrize("family", ONE_BY_ONE)
@pytest.mark.parametrize("schema", VALUES, ids=json.dumps)
def test_a_value_is_read_as_it_was_meant(
    factory: MatcherFactory, tokenizer: Tokenizer, family: str, schema: dict[str, Any]
) -> None:
    tool, rng, found = one(schema), random.Random(family), 0
    for _ in range(8):
        text = sample(grammar(factory, tokenizer, family, [tool], required=True, parallel=False), tokenizer, rng)
        parser = TOOL_FORMATS[family].parser(ToolSet({"f": tool.arguments_schema}))
        for call in parse_whole(parser, text or "").tool_calls:
            jsonschema.validate(json.loads(call.arguments), tool.arguments_schema)
            found += 1
    assert found >= 2


@pytest.mark.parametrize("reference", ["#", "#/properties/x", "#/$defs/node"])
@pytest.mark.parametrize("family", ["qwen3_coder", "pythonic"])
def test_references_keep_their_targets(
    factory: MatcherFactory, tokenizer: Tokenizer, family: str, reference: str
) -> None:
    whole = {"type": "object", "properties": {"x": {"type": "array", "items": {"$ref": reference}}}, "required": ["x"]}
    tool = GrammarTool("f", whole | {"$defs": {"node": {"$ref": "#"}}})
    inner = "[[]]" if reference == "#/properties/x" else '[{"x": []}]'
    frame = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n%s\n</parameter>\n</function>\n</tool_call>",
        "pythonic": "[f(x=%s)]",
    }[family]
    for text in ("[[]]", '[{"x": []}]'):
        matcher = grammar(factory, tokenizer, family, [tool], required=True, parallel=False)
        assert feed(matcher, tokenizer, frame % text) is (text == inner)


@pytest.mark.parametrize("family", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {}}}, r"\$ref"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {}}, "required": True}, "required"),
        ({"properties": []}, "properties"),
    ],
)
def test_what_limits_all_parameters_is_refused_by_name(family: str, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSchemaError, match=reason) as caught:
        spec_of(family, GrammarTool("f", schema, strict=True))
    assert caught.value.param == "tools"


@pytest.mark.parametrize("schema", [{"enum": []}, {"enum": [1]}, {"enum": ["a</parameter>"]}, {"pattern": "a"}])
def test_a_text_that_cannot_be_written_is_refused(schema: dict[str, Any]) -> None:
    tool = one({"type": "string"} | schema)
    with pytest.raises(InvalidSchemaError, match="text parameter"):
        spec_of("qwen3_coder", replace(tool, strict=True))
    spec_of("qwen3_coder", tool)


AGENTS_BRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "url": {"type": "string", "format": "uri-template", "pattern": r"^(?!file:).+$", "minLength": 1},
        "tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "mail": {"type": ["string", "null"], "pattern": r"^(a)\1$"},
        "word": {"type": ["string", "null"], "pattern": r"\bcat\b"},
        "end": {"type": ["string", "null"], "pattern": r"(?>a+)\Z"},
    },
    "required": ["url", "tags", "mail"],
    "anyOf": [{"required": ["url"]}],
    "dependentRequired": {"mail": ["url"]},
}
BROUGHT = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=url>\nx\n</parameter>\n<parameter=tags>\n[1]\n</parameter>\n"
    '<parameter=mail>\n"y"\n</parameter>\n</function>\n</tool_call>',
    "pythonic": '[f(url="x", tags=[1], mail="y")]',
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"url": "x", "tags": [1], "mail": "y"}}\n</tool_call>',
}


@pytest.mark.parametrize("family", BROUGHT)
def test_only_a_strict_tool_is_refused_for_what_cannot_be_enforced(
    factory: MatcherFactory, tokenizer: Tokenizer, family: str
) -> None:
    """Of another tool's schema the rest is enforced: OpenAI and Anthropic take any schema without `strict`."""
    text, tool = BROUGHT[family], GrammarTool("f", AGENTS_BRING)
    for given, good in ((text, True), (text.replace("1", '"a"'), False)):
        matcher = grammar(factory, tokenizer, family, [tool], required=True, parallel=False)
        assert feed(matcher, tokenizer, given) is good
    with pytest.raises(InvalidSchemaError):
        factory(spec_of(family, replace(tool, strict=True)))


ODD: list[Any] = [
    *(None, "string", {"type": "any"}, {"type": ["string", "any"]}, {"type": [{}]}, {"type": "string", "enum": None}),
    *({"required": None}, {"properties": None}, {"properties": {"a": "b"}}, {"items": None}, {"enum": []}),
    *({"enum": [2**60]}, {"anyOf": [None]}, {"anyOf": []}, {"type": "string", "anyOf": [True]}, {"minimum": "0"}),
    *({"type": "string", "oneOf": {}}, {"$ref": "https://example.com/a"}, {"$ref": "#/$defs/none"}, {"$ref": 1}),
    *({"$schema": "http://json-schema.org/schema#"}, {"minItems": 1.5}, {"patternProperties": {"(?!a)": {}}}),
    *({"additionalProperties": None}, {"multipleOf": 0}, {"format": None}, {"minLength": -1}, {"$defs": []}),
]


@pytest.mark.parametrize("family", BROUGHT)
def test_what_is_no_schema_is_left_out(factory: MatcherFactory, tokenizer: Tokenizer, family: str) -> None:
    properties = AGENTS_BRING["properties"] | {f"p{i}": odd for i, odd in enumerate(ODD)}
    whole = {"$schema": "draft-07", "properties": properties, "required": AGENTS_BRING["required"]}
    tool, text = GrammarTool("f", whole), BROUGHT[family]
    for given, good in ((text, True), (text.replace("1", '"a"'), False)):
        matcher = grammar(factory, tokenizer, family, [tool], required=True, parallel=False)
        assert feed(matcher, tokenizer, given) is good
    for odd in ODD:
        try:
            spec_of(family, replace(one(odd), strict=True))
        except InvalidSchemaError as error:
            assert error.param == "tools"


@pytest.mark.parametrize("family", BROUGHT)
def test_the_outline_of_a_schema_has_names_and_types(
    factory: MatcherFactory, tokenizer: Tokenizer, family: str
) -> None:
    """What is left of a schema of which a part cannot be read."""
    shared = {"properties": {"url": {"type": "string", "pattern": "("}}, "required": ["url"]}
    tags = {"properties": {"tags": {"type": "array"}, "mail": {"enum": []}}, "required": ["tags"]}
    schema = {"allOf": [{"$ref": "#/$defs/shared"}, tags], "anyOf": [tags, True], "$defs": {"shared": shared}}
    tool, text = GrammarTool("f", schema).outlined, BROUGHT[family]
    for given, good in ((text, True), (text.replace("[1]", "1"), False)):
        matcher = grammar(factory, tokenizer, family, [tool], required=True, parallel=False)
        assert feed(matcher, tokenizer, given) is good
    assert tool.schema is not None and tool.schema["required"] == ["url", "tags"]


def test_a_required_parameter_without_a_schema_is_written(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    tool = GrammarTool("f", {"properties": {"a": False}, "required": ["b"]})
    for text, good in (("[f(b=1)]", True), ("[f()]", False), ("[f(a=1,", False)):
        assert feed(factory(spec_of("pythonic", tool)), tokenizer, text) is good


def test_many_parameters() -> None:
    names = [f"p{i}" for i in range(1200)]
    tool = GrammarTool("f", {"properties": {name: {"type": "null"} for name in names}, "required": names[::2]})
    assert spec_of("pythonic", tool).source.count("%json") == len(names)
    with pytest.raises(InvalidSchemaError, match="larger than"):
        spec_of("pythonic", GrammarTool("f", {"properties": {f"p{i}": {"type": "null"} for i in range(9000)}}))


@pytest.mark.parametrize("reference", ["#/$defs/p0", "#"])
def test_a_small_request_makes_no_huge_grammar(reference: str) -> None:
    references = {f"p{i}": {"$ref": reference} for i in range(3000)}
    began = time.thread_time()
    with pytest.raises(InvalidSchemaError, match="larger than"):
        spec_of("qwen3_coder", GrammarTool("f", {"properties": references, "$defs": {name: {} for name in references}}))
    assert time.thread_time() - began < 1


def test_a_schema_that_many_references_name_is_read_once() -> None:
    places = [
        f"#/$defs/{''.join(f'%{ord(c):02x}' if i >> k & 1 else c for k, c in enumerate('abcdefgh'))}"
        for i in range(256)
    ]
    joined = {"anyOf": [{"$ref": place} for place in places]}
    tool = GrammarTool("f", joined | {"properties": {"x": joined}, "$defs": {"abcdefgh": {"anyOf": [{}] * 5000}}})
    began = time.thread_time()
    spec_of("qwen3_coder", tool)
    assert tool.outlined.schema == {"type": "object", "properties": {"x": {}}, "required": []}
    assert time.thread_time() - began < 1


def test_a_reference_to_no_place_in_a_list_has_no_target() -> None:
    for place in ("9" * 5000, "1"):
        tool = one({"anyOf": [{"$ref": f"#/properties/x/anyOf/{place}"}]})
        assert "$ref" not in spec_of("hermes", tool).source
        assert tool.outlined.schema is not None


@pytest.mark.parametrize(("family", "answer"), [("llama3_json", {"type": "object"}), ("qwen3_coder", None)])
def test_a_schema_that_is_nested_deep_is_refused(family: str, answer: dict[str, Any] | None) -> None:
    part: dict[str, Any] = {"$ref": "#"}
    for _ in range(900):
        part = {"items": part}
    tool = GrammarTool("f", {"properties": {"a": part}})
    with pytest.raises(InvalidSchemaError, match="deep"):
        tool_grammar(CallModel(family), [tool], required=answer is None, answer=answer)
