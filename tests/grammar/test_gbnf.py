"""Grammars in EBNF against what they mean, by a recogniser of their own for small ones."""

import itertools
import random
from typing import Any

import pytest

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.matcher import MatcherFactory
from jaxserve.grammar.translate import _rules, _terminals, gbnf_to_lark
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import grammar_spec
from tests.grammar.test_matcher import feed

# grammar, texts that match, texts that do not
CASES = [
    (r'root ::= "\u0041\x42" [\u00e9ab]', ["ABé", "ABb"], ["ABx"]),
    (r'root ::= "\u00e9ab\U0001F600"', ["éab😀"], ["\ue9ab"]),
    (r'root ::= "\[\"\\" [\[\]^] [^\]] [a/]', ['["\\[x/', '["\\^[a'], ['["\\]]', '["\\\\']),
    (r"root ::= [a&&b] [~~x] [+--] [a-c-] [\-z] [y-]", ["&~,--y", "bx+cz-"], ["c", "&-", "bx+czx"]),
    ('root ::= "\t" . ("a"*)* ("b"?)+', ["\t\n", "\txaab"], ["x"]),
    ("root ::= start | foo-bar foo_bar | 1a\nstart ::= \"s\"\nfoo-bar ::= 'x'".replace("'", '"')
     + '\nfoo_bar ::= "y"\n1a ::= "1"', ["s", "xy", "1"], ["xx"]),
    ('root ::= A A # "x"\nA ::= a "x"\na ::= "y" root?', ["yxyx", "yyxyxxyx"], ["x"]),
    ('root ::=\n  "a" # first\n  | ( "b" |\n)\n  "c"{2} | "d"{,2} |', ["a", "bcc", "cc", "dd", ""],
     ["bcd", "d" * 3]),
    ('root ::= "a" | "ab" | "abc"', ["a", "ab", "abc"], ["b"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_what_is_allowed(
    factory: MatcherFactory, tokenizer: Tokenizer, source: str, good: list[str], bad: list[str]
) -> None:
    for text in good:
        matcher = factory(grammar_spec(source))
        assert feed(matcher, tokenizer, text) and matcher.is_accepting, text
    for text in bad:
        matcher = factory(grammar_spec(source))
        assert not feed(matcher, tokenizer, text) or not matcher.is_accepting, text


@pytest.mark.parametrize(("source", "reason"), [
    ("", "no rule root"),
    ("x y z", "line 1"),
    ('root ::= "a"\n@', "line 2"),
    ("root ::= other", "'other' is undefined"),
    (r'root ::= "\q"', "escape"),
    (r'root ::= "\U00110000"', "escape"),
])  # fmt: skip
def test_refused_with_a_reason(source: str, reason: str) -> None:
    with pytest.raises(InvalidSchemaError, match=reason):
        gbnf_to_lark(source)


def test_regular_rules_are_terminals() -> None:
    """Not the root, not a rule that refers to itself, and not one that refers to such a rule."""
    source = 'root ::= "r"\na ::= b "x" | one\nb ::= [0-9]+\none ::= "1"\nc ::= c? "y"\nd ::= "z" c'
    assert _terminals(_rules(source)) == {"a", "b", "one"}


LONGEST = 4


def expression(rng: random.Random, names: list[str], depth: int = 0) -> tuple[str, Any]:
    """A random right side, and a function from the languages of all rules to its own, up to LONGEST characters."""
    kind = rng.randrange(8 if depth < 3 else 4)
    if kind < 2:
        char = rng.choice(["a", "b", "c", ""])
        return f'"{char}"', lambda _: {char}
    if kind == 2:
        return "[ab]", lambda _: {"a", "b"}
    if kind == 3:
        name = rng.choice(names)
        return name, lambda known: known[name]
    left, right = (expression(rng, names, depth + 1) for _ in range(2))
    if kind < 6:
        return f"({left[0]} {right[0]})", lambda known: joined(left[1](known), right[1](known))
    if kind == 6:
        return f"({left[0]} | {right[0]})", lambda known: left[1](known) | right[1](known)
    return f"({left[0]})?", lambda known: left[1](known) | {""}


def joined(left: set[str], right: set[str]) -> set[str]:
    return {one + other for one in left for other in right if len(one + other) <= LONGEST}


def languages(rules: dict[str, Any]) -> dict[str, set[str]]:
    known: dict[str, set[str]] = {name: set() for name in rules}
    while (found := {name: texts(known) for name, texts in rules.items()}) != known:
        known = found
    return known


def test_nothing_else_is_allowed(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    """Recursive rules of literals with one character, which no longest match can hide."""
    rng, checked = random.Random(7), 0
    texts = ["".join(chars) for size in range(LONGEST + 1) for chars in itertools.product("abc", repeat=size)]
    for _ in range(12):
        sides = {name: expression(rng, ["root", "x"]) for name in ("root", "x")}
        source = "\n".join(f"{name} ::= {text}" for name, (text, _) in sides.items())
        wanted = languages({name: meaning for name, (_, meaning) in sides.items()})["root"]
        try:
            spec = grammar_spec(source)
            factory(spec)
        except InvalidSchemaError:
            assert not wanted, source
            continue
        tokens = {char: tokenizer.encode(char)[0] for char in "abc"}
        for text in texts:
            matcher = factory(spec)
            ids = [tokens[char] for char in text]
            allowed = matcher.prefix(ids) == len(ids) and all(map(matcher.accept, ids)) and matcher.is_accepting
            assert not allowed or text in wanted, (source, text)
            checked += allowed
    assert checked > 20
