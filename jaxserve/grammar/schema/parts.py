"""Apply a change to each part of a JSON schema.

Knows which values of a schema are schemas, which are objects of schemas by name, and which are data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_DATA = frozenset({"enum", "const", "default", "examples", "example"})  # keys whose values are not schemas
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def with_parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the object of a JSON schema with `change` applied to each schema or list in it. Data stays as it is."""

    def changed(key: str, value: Any) -> Any:
        if key in _DATA:
            return value
        if key in BY_NAME and isinstance(value, dict):
            return {name: change(part) for name, part in value.items()}
        return change(value)

    return {key: changed(key, value) for key, value in schema.items()}


def moved(schema: Any, place: str) -> Any:
    """Return a schema whose references hold after moving it to `place` of another. One with an $id is not changed."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict) or "$id" in schema:
        return schema
    result = with_parts(schema, partial(moved, place=place))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        result["$ref"] = place + reference[1:]
    return result
