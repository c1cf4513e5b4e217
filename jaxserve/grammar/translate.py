"""Translates a GrammarSpec to the text of an llguidance grammar, and refuses what llguidance would not enforce exactly.

Checks the size of the source and bounds white space. The worker process checks whether the grammar can be built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import llguidance

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.gbnf import gbnf_to_lark
from jaxserve.grammar.schema.char_classes import ascii_classes, ascii_schema, quoted
from jaxserve.grammar.schema.parts import with_parts
from jaxserve.types.sampling import GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_ALTERNATIVES = 4096
MAX_INTEGER = 2**53  # of enum and const: llguidance rounds larger ones, and crashes at some near -2**63
HIDDEN = "\ufdd0"  # a noncharacter of Unicode, not allowed in interchange
# a special token's name in a Lark grammar, or what may contain the same characters: a comment, a text, a pattern
_LARK_NAME = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(?P<name><(?!\[)[^<>\s]+>)')
_LEAST_INTEGER = -(2**63) + 1024  # the next float64 above the least int64
# white space between JSON tokens: enough for pretty printing, but bounded
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE, "lenient": False}


def translate(spec: GrammarSpec) -> str:
    """Return the grammar text for llguidance.LLMatcher. Raises InvalidSchemaError with the reason."""
    if spec.checked:
        return spec.checked
    check_source(spec.source)
    if spec.kind not in _TRANSLATIONS:
        raise InvalidSchemaError(f"{spec.kind!r} is no kind of grammar", param="response_format")
    try:
        return _TRANSLATIONS[spec.kind](spec.source)
    except RecursionError as error:
        raise InvalidSchemaError("the grammar is nested too deep", param="response_format") from error


def check_source(source: str, param: str = "response_format") -> None:
    """Raise InvalidSchemaError if the source of a grammar is too large, or cannot be written in UTF-8."""
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise InvalidSchemaError("a text in the grammar has half of a surrogate pair", param=param) from None
    if size > MAX_SOURCE_BYTES:
        raise InvalidSchemaError(f"the grammar is larger than {MAX_SOURCE_BYTES} bytes", param=param)


def schema_spec(schema: Mapping[str, Any] | bool, *, strict: bool = False) -> GrammarSpec:
    """Return the spec of a JSON schema. strict: close objects that list properties, as in OpenAI's strict mode."""
    return GrammarSpec(kind="json_schema", source=json.dumps(closed(schema) if strict else schema))


def grammar_spec(text: str) -> GrammarSpec:
    """Return the spec of a grammar in EBNF (GBNF, as in SGLang and vLLM) or in Lark."""
    return GrammarSpec(kind="ebnf" if "::=" in text else "lark", source=text)


def choice_spec(choices: list[str]) -> GrammarSpec:
    return GrammarSpec(kind="choice", source=json.dumps(choices))


def json_schema_part(schema: Mapping[str, Any] | bool, *, exact: bool = True) -> str:
    """Return a JSON schema as a part of a Lark grammar.

    exact: raise InvalidSchemaError for what llguidance does not enforce; else leave it out
    """
    return "%json " + json.dumps({**_checked_schema(schema), "x-guidance": {**JSON_OPTIONS, "lenient": not exact}})


def check_depth(schema: Any) -> None:
    """Raise InvalidSchemaError if the schema is nested too deep."""
    if any(depth > MAX_SCHEMA_DEPTH for _, depth in _walk(schema)):
        raise InvalidSchemaError(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH}", param="response_format")


def closed(schema: Any, depth: int = 0) -> Any:
    """Return `schema` with additionalProperties false in each object that lists properties and does not mention others.

    Raises InvalidSchemaError if it is nested too deep.
    """
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidSchemaError(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH}", param="response_format")
    if isinstance(schema, list):
        return [closed(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = with_parts(schema, lambda part: closed(part, depth + 1))
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    return result


def loads(source: str, what: str) -> Any:
    """Parse JSON text. what: its name in error messages.

    Raises InvalidSchemaError if it is not JSON or nested too deep.
    """
    try:
        return json.loads(source)
    except ValueError as error:
        raise InvalidSchemaError(f"{what} is not valid JSON: {error}", param="response_format") from error
    except RecursionError as error:
        raise InvalidSchemaError(f"{what} is nested too deep", param="response_format") from error


def _json_schema(source: str) -> str:
    text = json.dumps(_checked_schema(loads(source, "the schema")))
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
    except ValueError as error:
        raise InvalidSchemaError(f"the schema cannot be read: {error}", param="response_format") from error


def _json_object(source: str) -> str:
    return _json_schema('{"type": "object"}')


def _checked_schema(schema: Any) -> dict[str, Any]:
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidSchemaError("the schema must be an object, and no value satisfies false", param="response_format")
    draft = schema.get("$schema")
    old_draft = not (isinstance(draft, str) and re.search("2019-09|2020-12", draft))
    check_depth(schema)
    schema = _without_idle(schema)
    for part, depth in _walk(schema):
        _refuse(part, old_draft=depth > 0 and old_draft)
    return ascii_schema(schema)


def _without_idle(schema: Any) -> Any:
    """Return a schema without the keywords that forbid nothing, of which llguidance cannot read some."""
    if isinstance(schema, list):
        return [_without_idle(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _bound(key, value) for key, value in schema.items() if not (key in _IDLE and _IDLE[key](value))}
    if "then" not in kept and "else" not in kept:
        kept.pop("if", None)
    if "if" not in kept:
        kept = {key: value for key, value in kept.items() if key not in ("then", "else")}
    if kept.get("contains") is not None and kept.get("minContains") == 0 and "maxContains" not in kept:
        kept = {key: value for key, value in kept.items() if key not in ("contains", "minContains")}
    if "contains" not in kept:
        kept = {key: value for key, value in kept.items() if key not in ("minContains", "maxContains")}
    return with_parts(kept, _without_idle)


def _bound(key: str, value: Any) -> Any:
    """Return a bound as llguidance can enforce it: it fails at the least int64, and takes bounds as float64."""
    at_least = key in ("minimum", "exclusiveMinimum")
    return _LEAST_INTEGER if at_least and _is_real(value) and -(2**63) - 1 <= value < _LEAST_INTEGER else value


def _takes_any(schema: Any) -> bool:
    return schema is True or schema == {}


def _takes_any_name(schema: Any) -> bool:
    """Return whether a schema takes every text, as names of properties are."""
    if not isinstance(schema, dict):
        return schema is True
    kinds = schema.get("type", "string")
    other = {key: value for key, value in schema.items() if key not in ("type", "title", "description", "$comment")}
    is_text = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    return is_text and all(key == "minLength" and value == 0 for key, value in other.items())


def _is_no_limit(value: Any) -> bool:
    """Return whether a count is larger than any output can reach."""
    return _is_real(value) and value >= 2**31 - 1


def _is_end_of_floats(value: Any) -> bool:
    """Return whether a bound is the largest float32 or float64, perhaps rounded: it is that of a type."""
    return _is_real(value) and (3.4028e38 <= abs(value) <= 3.4029e38 or abs(value) >= 1.7976e308)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# keyword -> whether a value of it forbids nothing
_IDLE: dict[str, Callable[[Any], bool]] = {
    "propertyNames": _takes_any_name,
    "uniqueItems": lambda value: value is False,
    "not": lambda value: value is False,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), lambda value: value == {}),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems", "then", "else"), _takes_any),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), _is_no_limit),
    **dict.fromkeys(("minimum", "exclusiveMinimum"), lambda value: _is_end_of_floats(value) and value < 0),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), lambda value: _is_end_of_floats(value) and value > 0),
}


def _walk(schema: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each object in the schema with its depth, without recursion."""
    stack: list[tuple[Any, int]] = [(schema, 0)]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, dict):
            yield node, depth
            stack += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            stack += [(value, depth + 1) for value in node]


def _refuse(part: dict[str, Any], *, old_draft: bool) -> None:
    """Refuse what llguidance accepts without enforcing it, or enforces differently from common validators."""
    options = part.get("x-guidance")
    if isinstance(options, dict) and options.get("lenient"):
        raise InvalidSchemaError("x-guidance.lenient is not allowed", param="response_format")
    if old_draft and isinstance(part.get("$ref"), str) and isinstance(part.get("$id"), str):
        message = "$id beside $ref: drafts differ in what the reference means, write it out"
        raise InvalidSchemaError(message, param="response_format")

    values = part["enum"] if isinstance(part.get("enum"), list) else [part.get("const")]
    if any(isinstance(value, int) and abs(value) > MAX_INTEGER for value in values):
        raise InvalidSchemaError("an integer above 2**53 in enum or const is not kept exactly", param="response_format")


def _regex(source: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(ascii_classes(source))


def _lark(source: str) -> str:
    return llguidance.LLMatcher.grammar_from_lark(_LARK_NAME.sub(_hidden, source))


def _hidden(piece: re.Match[str]) -> str:
    return hidden_name(piece[0]) if piece["name"] else piece[0]


def hidden_name(text: str) -> str:
    """Return the name by which matchers know a special token, which no text of a client spells."""
    return f"{text[:-1]}{HIDDEN}{text[-1:]}"


def shown_names(message: str) -> str:
    """Return llguidance's message with the names of special tokens as the client wrote them."""
    return message.replace(HIDDEN, "").replace(r"\u{fdd0}", "")


def _ebnf(source: str) -> str:
    return _lark(gbnf_to_lark(source))


def _choice(source: str) -> str:
    choices = loads(source, "the list of choices")
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_ALTERNATIVES:
        raise InvalidSchemaError(f"there must be 1 to {MAX_ALTERNATIVES} choices", param="response_format")
    if not all(isinstance(choice, str) for choice in choices):
        raise InvalidSchemaError("a choice must be a text", param="response_format")
    texts = [quoted(choice) for choice in dict.fromkeys(choices) if choice]
    if not texts:
        return _lark('start: ""')
    # One terminal, not one rule a choice: the parser takes at most 2,000 rules that begin at one place.
    return _lark(f"start: CHOICE{'?' if '' in choices else ''}\nCHOICE: {' | '.join(texts)}")


_TRANSLATIONS: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "lark": _lark,
    "ebnf": _ebnf,
    "choice": _choice,
}
