r"""ASCII meaning for `\d` and `\w` in the patterns of requests, as in ECMA-262, which JSON Schema names.

llguidance reads them as Unicode's classes, so that a "digit" could be any of 700 characters. Readers that take those
accept ASCII as well. Negations (`\D`, `\W`, `[^\d]`) keep Unicode's meaning, the narrower one.
"""

from __future__ import annotations

from typing import Any

_ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]"}
_DATA = frozenset({"enum", "const", "default", "examples", "example"})  # their values are no schemas


def ascii_classes(pattern: str) -> str:
    r"""The pattern with `\d` and `\w` written out, also within classes."""
    out: list[str] = []
    negated: list[bool] = []  # of the classes that are open
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
    """The opening of a class, with a bracket that stands first in it and is a literal."""
    end = at + 1 + pattern.startswith("[^", at)
    return pattern[at : end + pattern.startswith("]", end)]


def ascii_schema(schema: Any) -> Any:
    """The JSON schema with all its patterns passed through `ascii_classes`. Nested up to the depth that was checked."""
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
