"""Read the constraint on an output from its three forms: response_format, structured_outputs, SGLang's fields.

The result is a GrammarSpec. The grammar compiler decides whether it can be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxserve.api.protocol.common import ResponseFormat, SamplingFields, StructuredOutputs
from jaxserve.api.protocol.generate import NativeSampling
from jaxserve.errors import InvalidSchemaError, InvalidValueError
from jaxserve.grammar.structural import structural_tag_spec
from jaxserve.grammar.translate import MAX_SOURCE_BYTES, choice_spec, grammar_spec, schema_spec
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import GrammarSpec

Constraint = tuple[GrammarSpec, str]  # with the field it came from


def constraint(body: SamplingFields | NativeSampling, tokenizer: Tokenizer) -> Constraint | None:
    """Return the one constraint of a body.

    Raises InvalidValueError if there are two, InvalidSchemaError if it is not a grammar.
    """
    found: list[Constraint] = []
    if isinstance(body, SamplingFields):
        with _naming("response_format"):
            found += _response_format(body.response_format, tokenizer)
        with _naming("structured_outputs"):
            found += _structured_outputs(body.structured_outputs, tokenizer)
        found += _guided(body)
    elif body.structural_tag is not None:
        with _naming("structural_tag"):
            found.append((structural_tag_spec(body.structural_tag, special_tokens(tokenizer)), "structural_tag"))
    if body.json_schema is not None:
        found.append((schema_spec(_schema(body.json_schema, "json_schema")), "json_schema"))
    if body.regex is not None:
        found.append((GrammarSpec(kind="regex", source=body.regex), "regex"))
    if body.ebnf is not None:
        found.append((grammar_spec(body.ebnf), "ebnf"))
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise InvalidValueError(f"{names} exclude each other.", param=found[1][1])
    return found[0] if found else None


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Add the name of the request's field to an error about its grammar."""
    try:
        yield
    except InvalidSchemaError as error:
        raise InvalidSchemaError(error.message, param=param) from None


def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Map the text of each token that grammars must name by id to that id.

    llguidance also treats added tokens written <...> as special, whatever the tokenizer says of them.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        token.content: i
        for i, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def _response_format(wanted: ResponseFormat | None, tokenizer: Tokenizer) -> list[Constraint]:
    param = "response_format"
    if wanted is None:
        return []
    if wanted.type == "structural_tag":
        tag = wanted.model_extra or {}
        return [(structural_tag_spec(tag, special_tokens(tokenizer)), param)]
    schemas = _schemas_of(wanted)
    if wanted.type == "text":
        if schemas:
            raise InvalidValueError(f"{next(iter(schemas))} needs type json_schema.", param=f"{param}.type")
        return []
    if len(schemas) > 1:
        raise InvalidValueError(f"{' and '.join(schemas)} exclude each other.", param=list(schemas)[1])
    if schemas:
        strict = wanted.strict or (wanted.json_schema is not None and wanted.json_schema.strict)
        return [(schema_spec(*schemas.values(), strict=bool(strict)), param)]
    if wanted.type == "json_object":
        return [(GrammarSpec(kind="json_object", source=""), param)]
    where = f"{param}.json_schema" + ("" if wanted.json_schema is None else ".schema")
    raise InvalidValueError(f"{where} is missing.", param=where, code="missing_required_parameter")


def _schemas_of(wanted: ResponseFormat) -> dict[str, dict[str, Any] | bool]:
    """Map each field to its schema. An empty object beside json_object adds nothing to the type."""
    named = wanted.json_schema
    places = {"json_schema.schema": named and named.schema_, "schema": wanted.schema_, "value": wanted.value}
    empty = ({},) if wanted.type == "json_object" else ()
    return {
        f"response_format.{name}": schema
        for name, schema in places.items()
        if schema is not None and schema not in empty
    }


def _guided(body: SamplingFields) -> Iterator[Constraint]:
    """Read the fields that vLLM had before structured_outputs, and those of llama.cpp, TGI and Ollama."""
    if body.guided_json is not None:
        yield schema_spec(_schema(body.guided_json, "guided_json")), "guided_json"
    if body.guided_regex is not None:
        yield GrammarSpec(kind="regex", source=body.guided_regex), "guided_regex"
    if body.guided_choice is not None:
        yield choice_spec(body.guided_choice), "guided_choice"
    if body.guided_grammar is not None:
        yield grammar_spec(body.guided_grammar), "guided_grammar"
    if isinstance(body.grammar, str):
        yield grammar_spec(body.grammar), "grammar"
    elif body.grammar is not None:
        yield _typed(body.grammar.type, body.grammar.value), "grammar"
    if body.format:
        is_any = isinstance(body.format, str)
        yield (
            GrammarSpec(kind="json_object", source="") if is_any else schema_spec(_schema(body.format, "format")),
            "format",
        )


def _typed(kind: str, value: str | dict[str, Any] | bool | None) -> GrammarSpec:
    """Read TGI's form of a constraint. Raises InvalidValueError if its value does not go with its type."""
    if kind == "json_object" or (kind == "json" and value is None):
        return GrammarSpec(kind="json_object", source="")
    if kind == "regex":
        if not isinstance(value, str):
            raise InvalidValueError("grammar.value is a pattern for type regex.", param="grammar.value")
        return GrammarSpec(kind="regex", source=value)
    if value is None:
        raise InvalidValueError(f"grammar.value is a schema for type {kind}.", param="grammar.value")
    inner = value.get("schema") if isinstance(value, dict) and kind == "json_schema" else None
    return schema_spec(_schema(inner if isinstance(inner, dict) else value, "grammar.value"))


def _structured_outputs(wanted: StructuredOutputs | None, tokenizer: Tokenizer) -> list[Constraint]:
    if wanted is None:
        return []
    specs: list[GrammarSpec] = []
    if wanted.json_ is not None:
        specs.append(schema_spec(_schema(wanted.json_, "structured_outputs.json")))
    if wanted.json_object:
        specs.append(GrammarSpec(kind="json_object", source=""))
    if wanted.regex is not None:
        specs.append(GrammarSpec(kind="regex", source=wanted.regex))
    if wanted.choice is not None:
        specs.append(choice_spec(wanted.choice))
    if wanted.grammar is not None:
        specs.append(grammar_spec(wanted.grammar))
    if wanted.structural_tag is not None:
        specs.append(structural_tag_spec(wanted.structural_tag, special_tokens(tokenizer)))
    if len(specs) != 1:
        message = f"structured_outputs needs exactly one constraint; it has {len(specs)}."
        raise InvalidValueError(message, param="structured_outputs")
    return [(specs[0], "structured_outputs")]


def _schema(value: str | dict[str, Any] | bool, param: str) -> dict[str, Any] | bool:
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SOURCE_BYTES:
        raise InvalidSchemaError(f"{param} is larger than {MAX_SOURCE_BYTES} bytes.", param=param)
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidSchemaError(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidSchemaError(f"{param} must be an object.", param=param)
    return schema
