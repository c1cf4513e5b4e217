"""Which JSON types a parameter of a tool may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def schema_types(schema: Any, depth: int = 0) -> set[str]:
    """Return the JSON types that a schema's values may have; empty if it does not name any. References are not read."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    declared = schema.get("type")
    types = set(declared) if isinstance(declared, list) else {declared} if isinstance(declared, str) else set()
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    types |= {"string" if isinstance(value, str) else "other" for value in values} if not types else set()
    for key in ("anyOf", "oneOf"):
        for option in schema[key] if isinstance(schema.get(key), list) else []:
            types |= schema_types(option, depth + 1)
    return types
