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
    for part, depth in _walk(schema):
        _refuse(part, old_draft=depth > 0 and old_draft)
    return ascii_schema(schema)


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
