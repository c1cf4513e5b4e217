"""Describe a field of a JSON Schema in one line, for the reference pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]
Text = Callable[[str], str]

# keywords of JSON Schema, and the names that pydantic writes for a number inside a union
_SIGNS = {
    ("minimum", "ge"): "≥",
    ("exclusiveMinimum", "gt"): ">",
    ("maximum", "le"): "≤",
    ("exclusiveMaximum", "lt"): "<",
}
_SIZES = {
    "minItems": ("at least", "entries"),
    "minLength": ("at least", "characters"),
    "maxItems": ("at most", "entries"),
    "maxLength": ("at most", "characters"),
    "maxProperties": ("at most", "entries"),
}
_POWERS = {2**power - 1: f"2^{power} - 1" for power in (31, 63)}
_POWERS |= {sign * 2**power: f"{'-' if sign < 0 else ''}2^{power}" for power in (31, 63) for sign in (1, -1)}


def type_text(field: Json, *, named: Text = str, text: Text = str) -> str:
    """Return the type and the limits of a field, without null.

    named: formats the name of a model that the field refers to
    text: formats everything else, such as `html.escape`
    """
    branches = [branch for branch in field.get("anyOf", field.get("oneOf", [field])) if branch.get("type") != "null"]
    return " or ".join(dict.fromkeys(_branch(branch, named, text) for branch in branches))


def _branch(branch: Json, named: Text, text: Text) -> str:
    if "anyOf" in branch or "oneOf" in branch:
        return type_text(branch, named=named, text=text)
    if "$ref" in branch:
        return named(branch["$ref"].rpartition("/")[2])
    if "enum" in branch or "const" in branch:
        return text(", ".join(map(str, branch.get("enum", [branch.get("const")]))))
    kind = str(branch.get("type", "any"))
    limits = [text(limit) for limit in _limits(branch)]
    if kind == "array":
        inner = type_text(branch.get("items", {}), named=named, text=text)
        return ", ".join([f"list of {inner}", *limits])
    if kind == "object" and "properties" in branch:
        properties = branch["properties"].items()
        kind += " of " + ", ".join(
            f"{text(name)}: {type_text(value, named=named, text=text)}" for name, value in properties
        )
    return " ".join([kind, *limits])


def _limits(branch: Json) -> Iterator[str]:
    for names, sign in _SIGNS.items():
        for name in names:
            if name in branch:
                yield f"{sign} {_number(branch[name])}"
    for name, (bound, unit) in _SIZES.items():
        if name in branch:
            yield f"{bound} {branch[name]} {'entries' if branch.get('type') == 'array' else unit}"


def _number(value: float) -> str:
    return _POWERS.get(int(value)) or f"{int(value) if value == int(value) else value}"
