"""Which JSON types a parameter of a tool may have, and its text as JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

from jaxserve.text.tools.literals import parse_literal

MAX_JOIN_DEPTH = 8  # of schemas in schemas that are read
_MAX_DIGITS = 9  # of a place in a list


def schema_types(schema: Any, root: Any = None) -> set[str]:
    """Return the JSON types that a schema's values may have; empty if it does not name any.

    root: the schema that references point into; default: the schema itself
    "other" is among them if an alternative names none, and "indirect" if a reference or allOf names them.
    """
    return _types(schema, schema if root is None else root, {}, 0)


def _types(schema: Any, root: Any, known: dict[int, set[str]], depth: int) -> set[str]:
    """known: types by the id of a schema. Each is read once: what many references share, or a loop, would multiply."""
    if not isinstance(schema, Mapping) or depth > MAX_JOIN_DEPTH:
        return set()
    if id(schema) not in known:
        known[id(schema)] = set()  # in a loop
        known[id(schema)] = _read_types(schema, root, known, depth)
    return known[id(schema)]


def _read_types(schema: Mapping[str, Any], root: Any, known: dict[int, set[str]], depth: int) -> set[str]:
    declared = schema.get("type")
    types = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    types = types or {"string" if isinstance(value, str) else "other" for value in values}
    if types:
        return types
    reference = schema.get("$ref")
    if isinstance(reference, str):
        types = _types(pointed(root, reference), root, known, depth + 1)
        return types and types | {"indirect"}
    for key in ("anyOf", "oneOf"):
        options = schema[key] if isinstance(schema.get(key), list) else []
        for option in itertools.filterfalse(_is_never, options):
            types |= _types(option, root, known, depth + 1) or {"other"}
    parts = schema["allOf"] if not types and isinstance(schema.get("allOf"), list) else []
    named = filter(None, (_types(part, root, known, depth + 1) for part in parts))
    return types or next((found | {"indirect"} for found in named), set())


def _is_never(schema: Any) -> bool:
    """Return whether no value satisfies the schema. Zod writes an optional parameter with such an alternative."""
    return schema is False or (isinstance(schema, Mapping) and schema.get("not") in ({}, True))


def pointed(root: Any, reference: str) -> Any:
    """Return what a reference of the form #/a/b (RFC 6901) points to in a schema; None if there is nothing."""
    if not reference.startswith("#"):
        return None
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and key.isdecimal() and len(key) <= _MAX_DIGITS and int(key) < len(root):
            root = root[int(key)]
        elif isinstance(root, Mapping) and key in root:
            root = root[key]
        else:
            return None
    return root


def as_json(text: str, types: Collection[str] = ()) -> str:
    """Return a parameter's text as JSON: itself if it is JSON of an allowed type, else a string.

    Python's words count as JSON, and where an array or an object is allowed, Python's literals.
    """
    value = _value(text.strip(_JSON_SPACE), types)
    if value is _NO_VALUE:
        return json.dumps(text, ensure_ascii=False)
    if types and not _fits(value, types) and "string" in types:
        return json.dumps(text, ensure_ascii=False)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def as_object(text: str) -> str:
    """Return the JSON of a text that may be an object written as Python does; any other text as it is."""
    try:
        value = None if _is_json(text) else parse_literal(text)
    except ValueError:
        return text
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_of(text: str, types: Collection[str]) -> bool:
    """Return whether a parameter's text is a value of one of `types`, none of which takes any text."""
    if not types or not {"string", "other"}.isdisjoint(types):
        return False
    value = _value(text.strip(_JSON_SPACE), types)
    return value is not _NO_VALUE and _fits(value, types)


def is_value(text: str, types: Collection[str]) -> bool:
    """Return whether a parameter's text is a value written as JSON, or where `types` allow it, as Python does."""
    return _value(text.strip(_JSON_SPACE), types) is not _NO_VALUE


def _value(text: str, types: Collection[str]) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if text[:1] in _BRACKETS and not _BRACKETS[text[:1]].isdisjoint(types):
        try:
            return parse_literal(text)
        except ValueError:
            return _NO_VALUE
    return _PYTHON_WORDS.get(text, _NO_VALUE)


_JSON_SPACE = " \t\n\r"
_NO_VALUE = object()
_BRACKETS = {"[": {"array"}, "(": {"array"}, "{": {"object"}}
_PYTHON_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
_KINDS: tuple[tuple[type, set[str]], ...] = (
    (bool, {"boolean"}),
    (int, {"integer", "number"}),
    (float, {"number"}),
    (str, {"string"}),
    (list, {"array"}),
    (dict, {"object"}),
)


def _fits(value: Any, types: Collection[str]) -> bool:
    kinds = next((names for kind, names in _KINDS if isinstance(value, kind)), {"null"})
    return bool(kinds & set(types)) or "other" in types
