r"""`\d` and `\w` are ASCII wherever a request writes a pattern."""

import json
from typing import Any

import pytest

from jaxserve.grammar.matcher import MatcherFactory
from jaxserve.grammar.structural import structural_tag_spec
from jaxserve.grammar.tools import GrammarTool
from jaxserve.grammar.translate import ascii_classes
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import GrammarSpec
from tests.grammar.test_grammar_tools import grammar
from tests.grammar.test_matcher import feed

THREE, E_ACUTE = "\u0663", "\u00e9"  # a digit and a letter of other scripts


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d+", "[0-9]+"),
        (r"[\d.]", "[[0-9].]"),
        (r"[^\d]\d", r"[^\d][0-9]"),
        (r"[^]\d]\d", r"[^]\d][0-9]"),
        (r"\\d\\\d", r"\\d\\[0-9]"),
        (r"\D\W\s", r"\D\W\s"),
        (r"[\]\d]", r"[\][0-9]]"),
        (r"[]\w]", "[][0-9A-Za-z_]]"),
        (r"[[:alpha:]\d]\d", "[[:alpha:][0-9]][0-9]"),
        ("a\\", "a\\"),
        (r"[^a&&b][~~]&&--", r"[^a&\&b][~\~]&&--"),
        (r"[+--][--/][a-]", r"[+-\-][\--/][a-]"),
        (r"\[[^[\]]+\]\d", r"\[[^\[\]]+\][0-9]"),
    ],
)
def test_what_is_written_out(pattern: str, expected: str) -> None:
    assert ascii_classes(pattern) == expected


SCHEMA: dict[str, Any] = {"type": "string", "pattern": r"^\d\w$"}
DIGITS = {r"^\d$": {"const": 1}}
KEYS = {"type": "object", "patternProperties": DIGITS, "additionalProperties": False, "minProperties": 1}
DATA = {"enum": [{"pattern": r"\d"}]}


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec(kind="regex", source=r"\d\w"), ["3a"], [THREE, "3" + E_ACUTE]),
        (GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA)), ['"3a"'], [f'"{THREE}', f'"3{E_ACUTE}']),
        (GrammarSpec(kind="json_schema", source=json.dumps(KEYS)), ['{"3": 1}'], [f'{{"{THREE}']),
        (GrammarSpec(kind="json_schema", source=json.dumps(DATA)), [r'{"pattern": "\\d"}'], []),
    ],
)
def test_only_ascii_digits_are_drawn(
    factory: MatcherFactory, tokenizer: Tokenizer, spec: GrammarSpec, good: list[str], bad: list[str]
) -> None:
    for text in good:
        matcher = factory(spec)
        assert feed(matcher, tokenizer, text) and matcher.is_accepting, matcher.error
    for text in bad:
        assert not feed(factory(spec), tokenizer, text)


HEADS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"input": "',
    "glm45": "<tool_call>f\n<arg_key>input</arg_key>\n<arg_value>",
}


@pytest.mark.parametrize("family", HEADS)
def test_in_custom_tools_too(factory: MatcherFactory, tokenizer: Tokenizer, family: str) -> None:
    def fed(text: str) -> bool:
        tools = [GrammarTool("f", custom=True, regex=r"\d")]
        return feed(grammar(factory, tokenizer, family, tools, required=True), tokenizer, HEADS[family] + text)

    assert fed("3") and not fed(THREE)


def test_in_structural_tags_too(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    tag = {"format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": r"\d"}, "end": "</a>"}}
    spec = structural_tag_spec(tag, {})
    assert feed(factory(spec), tokenizer, "<a>3") and not feed(factory(spec), tokenizer, "<a>" + THREE)
