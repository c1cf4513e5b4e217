"""Structural tags in both forms: text is free, what a trigger begins is not."""

from typing import Any

import pytest

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.matcher import GrammarMatcher, MatcherFactory
from jaxserve.grammar.structural import structural_tag_spec
from jaxserve.text.tokenizer import Tokenizer
from tests.grammar.test_matcher import feed, written

INTEGER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<fn=f>", "schema": INTEGER, "end": "</fn>"},
        {
            "begin": "<fn=g>",
            "schema": {"type": "object", "properties": {}, "additionalProperties": False},
            "end": "</fn>",
        },
    ],
    "triggers": ["<fn="],
}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def fmt(**parts: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": parts}


TAG_F = {"type": "tag", "begin": "<fn=f>", "content": schema(INTEGER), "end": "</fn>"}
TAG_ANY = {"type": "tag", "begin": "<note>", "content": {"type": "any_text"}, "end": "</note>"}
CALL = {"type": "tag", "begin": "<tool_call>", "content": schema(INTEGER), "end": "</tool_call>"}

# tag, texts that match to the end, texts that cannot go on
CASES = [
    (OLDER, ["plain < text", 'a <fn=f>{"x": 1}</fn> b <fn=g>{}</fn>', ""], ["<fn=h>", '<fn=f>{"y"', "<fn=g>{}<x"]),
    (fmt(type="triggered_tags", triggers=["<fn"], tags=[TAG_F], at_least_one=True),
     ['a <fn=f>{"x": 1}</fn>'], ["<fn=g"]),
    (fmt(type="triggered_tags", triggers=["<fn"], tags=[TAG_F], stop_after_first=True),
     ['a <fn=f>{"x": 1}</fn>'], ['a <fn=f>{"x": 1}</fn>b']),
    (fmt(type="triggered_tags", triggers=["<tool_call>"], tags=[CALL]), ['a <tool_call>{"x": 1}</tool_call> b'],
     ["<tool_call>["]),
    (fmt(type="sequence", elements=[TAG_ANY, {"type": "const_string", "value": "="}, schema({"type": "integer"})]),
     ["<note>a\n<b</note>=12"], ["<note></note>12"]),
    (fmt(type="or", elements=[schema({"type": "integer"}), {"type": "regex", "pattern": "[a/]+b"}]),
     ["12", "a/b"], ["c"]),
    (fmt(type="regex", pattern="^a\\/\n\\\n\\\\/b$"), ["a/\n\n\\/b"], ["a\\"]),
    (fmt(type="tags_with_separator", tags=[TAG_F, TAG_ANY], separator=", ", at_least_one=True),
     ['<fn=f>{"x": 1}</fn>', '<note>a</note>, <fn=f>{"x": 1}</fn>'], ["<note>a</note><fn", "x"]),
    (fmt(type="tags_with_separator", tags=[TAG_F], separator=";"), [""], ["x"]),
    (fmt(type="any_text"), ["anything"], []),
]  # fmt: skip


@pytest.mark.parametrize("tag, good, bad", CASES)
def test_forms(factory: MatcherFactory, tokenizer: Tokenizer, tag: Any, good: list[str], bad: list[str]) -> None:
    special = {text: i for i in tokenizer.special_ids if (text := tokenizer.id_to_token(i))}

    def fresh() -> GrammarMatcher:
        return factory(structural_tag_spec(tag, special))

    for text in good:
        matcher = fresh()
        assert feed(matcher, tokenizer, text) and matcher.is_accepting, text
    for text in bad:
        assert not feed(fresh(), tokenizer, text), text


def test_a_constant_text_that_spells_a_special_token_is_written_in_ordinary_ones(
    factory: MatcherFactory, tokenizer: Tokenizer
) -> None:
    """The tag of a format is that token. As a text, one that ends a turn would cut the answer."""
    special = {text: i for i in tokenizer.special_ids if (text := tokenizer.id_to_token(i))}
    for text in special:
        constant = {"type": "const_string", "value": f"a{text}"}
        matcher = factory(structural_tag_spec(fmt(**constant), special))
        assert written(matcher, tokenizer, f"a{text}", 320) and matcher.is_accepting
        matcher = factory(structural_tag_spec(fmt(type="tag", begin=text, content=constant, end="x"), special))
        assert matcher.accept(special[text]) and written(matcher, tokenizer, f"a{text}x", 320)


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        inner = {"type": "sequence", "elements": [inner]}
    return fmt(**inner)


def triggers(count: int, depth: int) -> dict[str, Any]:
    """Each of `count` triggers begins each tag, so that the grammar has count ** depth parts."""
    inner: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        tag = {"begin": "<" * count, "content": inner, "end": ">"}
        inner = {"type": "triggered_tags", "triggers": ["<" * (i + 1) for i in range(count)], "tags": [tag]}
    return inner


@pytest.mark.parametrize("tag, reason", [
    ("{", "not valid JSON"),
    ("[]", "must be an object"),
    ({}, "structures"),
    ({"structures": [], "triggers": []}, "structures"),
    (OLDER | {"triggers": ["<other"]}, "no tag begins"),
    (OLDER | {"structures": ["<fn=f>"]}, "each of structures must be an object"),
    (OLDER | {"triggers": ["<fn=f"]}, "begins with no trigger"),
    (OLDER | {"triggers": [1]}, "must be a text"),
    (fmt(type="grammar", grammar="root ::= x"), "'grammar' is not served"),
    (fmt(type="qwen_xml_parameter"), "not served"),
    (fmt(type="tag", begin="a", end=None), "end must be a text"),
    (nested(20), "nested deeper"),
    (fmt(type="const_string", value="x" * 300_000), "larger than"),
    (fmt(**triggers(12, 12)), "larger than"),
])  # fmt: skip
def test_refused_by_name(tag: Any, reason: str) -> None:
    with pytest.raises(InvalidSchemaError, match=reason):
        structural_tag_spec(tag, {})
