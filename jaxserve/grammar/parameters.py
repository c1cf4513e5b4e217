"""The parameters of a tool, for formats of calls that write them one by one, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.schemas import moved
from jaxserve.text.tools.base import schema_types

_WHOLE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas"})
_WHOLE |= {"dependencies", "patternProperties", "minProperties", "maxProperties", "propertyNames"}
_TEXT = frozenset({"pattern", "format", "minLength", "maxLength", "allOf", "not", "if"})


class Parameter(NamedTuple):
    """schema: stands alone, with the targets of its references"""

    name: str
    schema: Any
    required: bool


def parameters_of(schema: Mapping[str, Any]) -> list[Parameter]:
    """Return the parameters of a tool, in order: those of `properties`, then others that are required.

    Raises InvalidSchemaError (param tools) if the schema says more than each parameter's own schema can.
    """
    if unkept := sorted(_WHOLE & schema.keys()):
        raise _error(f"{', '.join(unkept)} of a tool's parameters cannot be enforced in this model's format of calls")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _error("properties of a tool must be an object, and required a list")
    others = dict.fromkeys(name for name in required if isinstance(name, str) and name not in properties)
    parts = properties | dict.fromkeys(others, schema.get("additionalProperties", True))
    used = {name: part for name, part in parts.items() if part is not False or name in required}
    return [Parameter(name, _standing_alone(part, schema), name in required) for name, part in used.items()]


def _standing_alone(part: Any, schema: Mapping[str, Any]) -> Any:
    """Return a parameter's schema with the targets of its references into the whole schema."""
    if not isinstance(part, dict) or "$ref" not in (text := json.dumps(part)):
        return part
    head = {"$schema": schema["$schema"]} if "$schema" in schema else {}
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    local = json.dumps(definitions) + text
    if local.count('"$ref"') == local.count('"$ref": "#/$defs/') + local.count('"$ref": "#/definitions/'):
        return head | definitions | part
    return head | {"$defs": {"whole": moved(schema, "#/$defs/whole")}} | moved(part, "#/$defs/whole")


def is_text(schema: Any) -> bool:
    """Return whether a parameter is written without quotes, because it is always a string."""
    return schema_types(schema) == {"string"}


def texts_of(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the values of a text parameter; None if it may be any text.

    Raises InvalidSchemaError (param tools) if a keyword limits it in another way.
    """
    lists = [key for key in ("enum", "const", "anyOf", "oneOf") if key in schema]
    if unkept := sorted(_TEXT & schema.keys()) + lists[1:]:
        what = ", ".join(unkept)
        raise _error(f"a text parameter with {what} cannot be enforced in this model's format of calls")
    if not lists:
        return None
    (key,) = lists
    if key in ("enum", "const"):
        values = [schema[key]] if key == "const" else schema[key]
        return [value for value in values if isinstance(value, str)]
    found = [texts_of(option) for option in schema[key]]
    return None if None in found else [text for texts in found for text in texts or ()]


def _error(message: str) -> InvalidSchemaError:
    return InvalidSchemaError(message, param="tools")
