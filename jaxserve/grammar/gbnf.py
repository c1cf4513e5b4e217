"""Translates grammars in EBNF, as in llama.cpp (GBNF), XGrammar, SGLang and vLLM, to llguidance's variant of Lark.

A rule that refers to no recursive rule becomes a terminal: the lexer takes its longest match and never goes back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.schema.char_classes import quoted

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*) | (?P<rule>[\w-]+)\s*::= | (?P<name>[\w-]+) | "(?P<text>(?:[^"\\\n]|\\.)*)"
    | \[(?P<class>(?:[^\]\\]|\\.)+)\] | (?P<any>\.) | (?P<mark>[()|]) | (?P<repeat>[*+?]|\{[\s\d,]*\})""",
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in "\"'\\[]/-^"}

Tokens = list[tuple[str, str]]  # (kind, text)


def gbnf_to_lark(source: str) -> str:
    """Return the Lark text of a grammar whose rules are `name ::= ...`; it begins with `root`.

    Raises InvalidSchemaError with the reason.
    """
    rules = _rules(source)
    if "root" not in rules:
        raise _error("the grammar has no rule root")
    for body in rules.values():
        for kind, text in body:
            if kind == "name" and text not in rules:
                raise _error(f"the grammar's rule {text!r} is undefined")
    terminals = _terminals(rules)
    names = {name: f"{'T' if name in terminals else 'r'}{i}" for i, name in enumerate(rules)} | {"root": "start"}
    return "\n".join(["%llguidance {}", *(f"{names[name]}: {_body(body, names)}" for name, body in rules.items())])


def _rules(source: str) -> dict[str, Tokens]:
    rules: dict[str, Tokens] = {}
    body: Tokens | None = None
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None or (body is None and match.lastgroup not in ("rule", "skip")):
            line = source.count("\n", 0, at) + 1
            raise _error(f"the grammar cannot be read: line {line}, at {source[at : at + 20]!r}")
        kind, at = match.lastgroup or "", match.end()
        if kind == "rule":
            body = rules[match["rule"]] = []
        elif kind != "skip" and body is not None:
            body.append((kind, match[kind]))
    return rules


def _terminals(rules: dict[str, Tokens]) -> set[str]:
    """Return the names of the rules that are regular as far as their references show; `root` stays a rule."""
    references = {name: {text for kind, text in body if kind == "name"} for name, body in rules.items()}
    del references["root"]
    found: set[str] = set()
    while more := {name for name, others in references.items() if name not in found and others <= found}:
        found |= more
    return found


def _body(body: Tokens, names: dict[str, str]) -> str:
    """Return the right side of a rule; an alternative without anything in it is the empty text."""
    written = [""]
    for before, (kind, text) in pairwise([("mark", "|"), *body, ("mark", "|")]):
        if before in _OPENINGS and (kind, text) in _CLOSINGS:
            written.append('""')
        match kind:
            case "name":
                written.append(names[text])
            case "text":
                written.append(quoted("".join(char for char, _ in _chars(text))))
            case "class":
                written.append(f"/[{_class(text)}]/")
            case "any":
                written.append(r"/(.|\n)/")
            case _:
                written.append("".join(text.split()))
    return " ".join(written[:-1]).strip()


_OPENINGS = (("mark", "|"), ("mark", "("))
_CLOSINGS = (("mark", "|"), ("mark", ")"))


def _class(text: str) -> str:
    """Return the inside of a class for a regex: each character that is no letter or digit is written by its number."""
    chars = list(_chars(text))
    negated, at, out = chars[0] == ("^", False), 0, ""
    chars = chars[negated:]
    while at < len(chars):
        if chars[at + 1 : at + 2] == [("-", False)] and at + 2 < len(chars):
            out += f"{_numbered(chars[at][0])}-{_numbered(chars[at + 2][0])}"
            at += 3
        else:
            out += _numbered(chars[at][0])
            at += 1
    return "^" * negated + out


def _numbered(char: str) -> str:
    return char if char.isalnum() else f"\\u{{{ord(char):x}}}"


def _chars(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a literal or a class, each with whether it was escaped."""
    for match in _CHAR.finditer(text):
        if match[5] is not None:
            yield match[5], False
            continue
        number = match[1] or match[2] or match[3]
        char = _ESCAPES.get(match[4] or "") if number is None else _char(int(number, 16))
        if char is None:
            raise _error(f"the grammar cannot be read: the escape {match[0]!r} is unknown")
        yield char, True


def _char(number: int) -> str | None:
    return chr(number) if number < 0x110000 else None


def _error(message: str) -> InvalidSchemaError:
    return InvalidSchemaError(message, param="response_format")
