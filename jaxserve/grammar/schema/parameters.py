"""The parameters of a tool, for formats of calls that write them one by one, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.schema.parts import moved
from jaxserve.text.tools.base import schema_types

_WHOLE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas"})
_WHOLE |= {"dependencies", "patternProperties", "minProperties", "maxProperties", "propertyNames"}
_TEXT = frozenset({"pattern", "format", "minLength", "maxLength", "allOf", "not", "if"})


class Parameter(NamedTuple):
    """One parameter of a tool. schema: stands alone, with the targets of its references"""

    name: str
    schema: Any
    required: bool


def parameters_of(schema: Mapping[str, Any], *, exact: bool = True) -> list[Parameter]:
    """Return the parameters of a tool, in order: those of `properties`, then others that are required.

    exact: raise InvalidSchemaError (param tools) if the schema says more than each parameter's own schema can; else
    ignore the rest, if there are properties
    """
    if (unkept := sorted(_WHOLE & schema.keys())) and (exact or not schema.get("properties")):
        raise _error(f"{', '.join(unkept)} of a tool's parameters cannot be enforced in this model's format of calls")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _error("properties of a tool must be an object, and required a list")
    needed = dict.fromkeys(name for name in required if isinstance(name, str))
    parts = properties | {name: schema.get("additionalProperties", True) for name in needed if name not in properties}
    used = {name: part for name, part in parts.items() if part is not False or name in needed}
    targets, place = _targets(schema)
    return [Parameter(name, _standing_alone(part, targets, place), name in needed) for name, part in used.items()]


def _targets(schema: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what a parameter's schema needs beside it for its references into the whole schema, and their new place.

    Computed once for all parameters: there may be thousands, and as many definitions.
    """
    head = {"$schema": schema["$schema"]} if "$schema" in schema else {}
    text = json.dumps(schema)
    if text.count('"$ref"') == text.count('"$ref": "#/$defs/') + text.count('"$ref": "#/definitions/'):
        return head | {key: schema[key] for key in ("$defs", "definitions") if key in schema}, ""
    return head | {"$defs": {"whole": moved(schema, "#/$defs/whole")}}, "#/$defs/whole"


def _standing_alone(part: Any, targets: dict[str, Any], place: str) -> Any:
    """Return a parameter's schema with the targets of its references."""
    if not isinstance(part, dict) or "$ref" not in json.dumps(part):
        return part
    return moved(part, place) | targets if place else targets | part


def is_text(schema: Any) -> bool:
    """Return whether a parameter is written without quotes, because it is always a string."""
    return schema_types(schema) == {"string"}


def texts_of(schema: Any, *, exact: bool = True) -> list[str] | None:
    """Return the values of a text parameter; None if it may be any text.

    exact: raise InvalidSchemaError (param tools) if a keyword limits it in another way; else ignore that
    """
    if not isinstance(schema, dict):
        return [] if schema is False else None
    lists = [key for key in ("enum", "const", "anyOf", "oneOf") if key in schema]
    if exact and (unkept := sorted(_TEXT & schema.keys()) + lists[1:]):
        what = ", ".join(unkept)
        raise _error(f"a text parameter with {what} cannot be enforced in this model's format of calls")
    if not lists:
        return None
    key = lists[0]
    values = [schema[key]] if key == "const" else schema[key]
    if not isinstance(values, list):
        raise _error(f"{key} of a text parameter must be a list")
    if key in ("enum", "const"):
        return [value for value in values if isinstance(value, str)]
    found = [texts_of(option, exact=exact) for option in values]
    return None if None in found else [text for texts in found for text in texts or ()]


def _error(message: str) -> InvalidSchemaError:
    return InvalidSchemaError(message, param="tools")
