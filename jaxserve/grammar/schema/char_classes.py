r"""Gives `\d` and `\w` in clients' patterns their ASCII meaning, as in ECMA-262, which JSON Schema refers to.

llguidance gives them Unicode's meaning, so that a "digit" could be any of 700 characters. Programs that accept those
also accept ASCII. Negations (`\D`, `\W`, `[^\d]`) keep Unicode's meaning, which is the narrower one.
"""

from __future__ import annotations

import json
from typing import Any

from jaxserve.grammar.schema.parts import with_parts

_ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]"}


def ascii_classes(pattern: str) -> str:
    r"""Return the pattern with `\d` and `\w` written out, also inside classes.

    Inside a class, `[`, `&&`, `~~` and `--` are escaped: they are characters, not operators as in Rust.
    """
    out: list[str] = []
    opening = ""  # of the class that is open
    at = 0
    while at < len(pattern):
        piece = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        size = len(piece)
        if size == 2 and piece[1] in _ASCII and not opening.startswith("[^"):
            piece = _ASCII[piece[1]]
        elif not opening and piece == "[":
            opening = piece = _class_start(pattern, at)
            size = len(piece)
        elif opening and pattern.startswith("[:", at) and ":]" in pattern[at:]:
            piece = pattern[at : pattern.index(":]", at) + 2]
            size = len(piece)
        elif opening and piece in ("[", "&", "~", "-"):
            piece = _in_class(piece, out, pattern[at + 1 : at + 2], opening)
        elif piece == "]":
            opening = ""
        out.append(piece)
        at += size
    return "".join(out)


def quoted(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _in_class(char: str, before: list[str], after: str, opening: str) -> str:
    """Return a character of a class, escaped if it or a pair of it would be an operator."""
    starts_range = char == "-" == after and before[-1] == opening
    return "\\" + char if char == "[" or before[-1] == char or starts_range else char


def _class_start(pattern: str, at: int) -> str:
    """Return the opening of a class, including a bracket that comes first and is a literal."""
    end = at + 1 + pattern.startswith("[^", at)
    return pattern[at : end + pattern.startswith("]", end)]


def ascii_schema(schema: Any) -> Any:
    """Return the JSON schema with `ascii_classes` applied to all patterns. Its nesting depth must have been checked."""
    if isinstance(schema, list):
        return [ascii_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = with_parts(schema, ascii_schema)
    if isinstance(pattern := result.get("pattern"), str):
        result["pattern"] = ascii_classes(pattern)
    if isinstance(named := result.get("patternProperties"), dict):
        result["patternProperties"] = {ascii_classes(pattern): part for pattern, part in named.items()}
    return result
