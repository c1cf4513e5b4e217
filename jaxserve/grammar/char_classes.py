r"""Gives `\d` and `\w` in clients' patterns their ASCII meaning, as in ECMA-262, which JSON Schema refers to.

llguidance gives them Unicode's meaning, so that a "digit" could be any of 700 characters. Programs that accept those
also accept ASCII. Negations (`\D`, `\W`, `[^\d]`) keep Unicode's meaning, which is the narrower one.
"""

from __future__ import annotations

from typing import Any

_ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]"}
_DATA = frozenset({"enum", "const", "default", "examples", "example"})  # keys whose values are not schemas


def ascii_classes(pattern: str) -> str:
    r"""Return the pattern with `\d` and `\w` written out, also inside classes."""
    out: list[str] = []
    negated: list[bool] = []  # of the open classes
    at = 0
    while at < len(pattern):
        piece = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        if len(piece) == 2 and piece[1] in _ASCII and not any(negated):
            out.append(_ASCII[piece[1]])
        elif piece == "[":
            negated.append(pattern.startswith("[^", at))
            piece = _class_start(pattern, at)
            out.append(piece)
        else:
            if piece == "]" and negated:
                negated.pop()
            out.append(piece)
        at += len(piece)
    return "".join(out)


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
    return {key: value if key in _DATA else _ascii_keyword(key, value) for key, value in schema.items()}


def _ascii_keyword(key: str, value: Any) -> Any:
    if key == "pattern" and isinstance(value, str):
        return ascii_classes(value)
    if key == "patternProperties" and isinstance(value, dict):
        return {ascii_classes(pattern): ascii_schema(part) for pattern, part in value.items()}
    return ascii_schema(value)
