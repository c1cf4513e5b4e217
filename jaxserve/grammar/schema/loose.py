"""What can be enforced of the schema of a tool that is not strict.

Agents bring tools whose schemas others wrote, and OpenAI and Anthropic take any of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from jaxserve.grammar.schema.parts import BY_NAME, with_parts
from jaxserve.text.tools.base import MAX_JOIN_DEPTH, pointed

_MAX_NUMBER = 2**53
_UNREADABLE = re.compile(r"\(\?(?:<?[=!]|>|P=)|\\[0-9bBGkZ]")  # looks around or back, or is another syntax than Rust's
_DRAFT = re.compile(
    r"http://json-schema\.org/draft-0[3467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_JOINS = ("allOf", "anyOf", "oneOf")


def loosened(schema: Any, root: Any = None) -> Any:
    """Return a schema, whose depth has been checked, without the keywords that llguidance cannot read.

    root: the schema that references point into; default: the schema itself
    """
    root = schema if root is None else root
    if isinstance(schema, list):
        return [loosened(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in _READABLE or _READABLE[key](value)}
    if "$ref" in kept and not _is_schema(pointed(root, kept["$ref"])):
        del kept["$ref"]
    for key in BY_NAME & kept.keys():
        is_read = _is_pattern if key == "patternProperties" else _is_text
        parts = kept[key].items()
        kept[key] = {name: part if _is_schema(part) else True for name, part in parts if is_read(name)}
    return with_parts(kept, partial(loosened, root=root))


def outline(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return no more of a tool's schema than the names of its parameters, their types, and which are required."""
    properties, required = dict[str, Any](), list[Any]()
    for part, is_needed in _parts(schema, schema, set(), 0):
        found, needed = part.get("properties"), part.get("required")
        for name, value in found.items() if isinstance(found, dict) else ():
            properties.setdefault(name, _kind(value))
        required += needed if is_needed and isinstance(needed, list) else ()
    names = list(dict.fromkeys(name for name in required if isinstance(name, str)))
    return {"type": "object", "properties": properties, "required": names}


def _parts(
    schema: Any, root: Any, seen: set[tuple[int, bool]], depth: int, needed: bool = True
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield a schema and those that it joins, each with whether all values must satisfy it. seen: what was yielded"""
    if not isinstance(schema, dict) or depth > MAX_JOIN_DEPTH or (id(schema), needed) in seen:
        return
    seen.add((id(schema), needed))
    yield schema, needed
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield from _parts(pointed(root, reference), root, seen, depth + 1, needed)
    for key in _JOINS:
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _parts(part, root, seen, depth + 1, needed and key == "allOf")


def _kind(schema: Any) -> dict[str, Any]:
    """Return no more of a parameter's schema than its type."""
    return {"type": schema["type"]} if isinstance(schema, dict) and _is_type(schema.get("type")) else {}


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_type(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and _are_texts(values) and _TYPES.issuperset(values)


def _is_kept(value: Any) -> bool:
    """Return whether a value of enum or const is compared exactly."""
    return not isinstance(value, int) or abs(value) <= _MAX_NUMBER


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NUMBER


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and not _UNREADABLE.search(value)


_READABLE: dict[str, Callable[[Any], bool]] = {
    "$schema": lambda value: isinstance(value, str) and bool(_DRAFT.fullmatch(value)),
    "type": _is_type,
    "enum": lambda value: isinstance(value, list) and bool(value) and all(map(_is_kept, value)),
    "const": _is_kept,
    "$ref": _is_text,
    "required": _are_texts,
    "pattern": _is_pattern,
    "format": _is_text,
    "multipleOf": lambda value: _is_number(value) and value > 0,
    "items": lambda value: _is_schema(value) or _are_schemas(value),
    "additionalProperties": _is_schema,
    "prefixItems": _are_schemas,
    "minimum": _is_number,
    "maximum": _is_number,
    "exclusiveMinimum": lambda value: _is_number(value) or isinstance(value, bool),
    "exclusiveMaximum": lambda value: _is_number(value) or isinstance(value, bool),
    **dict.fromkeys(_JOINS, _are_schemas),
    **dict.fromkeys(BY_NAME, lambda value: isinstance(value, dict)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count),
}
