"""Grammars for tool calls, in the format that the model family writes and text/tools/ parses.

required (or a named tool): the output consists only of calls. auto: free text; once a call begins, it must name a
tool of the request and match its schema.

A custom tool is written as a function with one text parameter "input", whose value must match the tool's regex or
Lark grammar (`embed`). If a tool with a Lark grammar is the only one and required, the output is the input itself.

Agents bring tools whose schemas others wrote, and OpenAI and Anthropic accept any of them. So if a tool is not strict,
its schema is `loosened` to the keywords that can be enforced. `parameters_of` splits a schema into parameters, for
formats of calls that write them one by one, as text or as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.embed import embed_before, embed_in_json
from jaxserve.grammar.translate import (
    ANY_TEXT,
    BY_NAME,
    LarkWriter,
    check_depth,
    check_source,
    closed,
    moved,
    one_of,
    quoted,
    with_parts,
)
from jaxserve.text.tools.base import MAX_JOIN_DEPTH, pointed, schema_types
from jaxserve.text.tools.format import CallFormat, Channels, JsonCall, NamedCall, NotedCall, PythonCall, TaggedCall
from jaxserve.text.tools.registry import TOOL_FORMATS
from jaxserve.types.sampling import GrammarSpec

_MAX_NUMBER = 2**53
_UNREADABLE = re.compile(r"\(\?(?:<?[=!]|>|P=)|\\[0-9bBGkZ]")  # looks around or back, or is not Rust's syntax
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
    """Return a tool's schema with only the names of its parameters, their types, and which are required."""
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
    """Yield a schema and the schemas that it joins, each with whether all values must satisfy it.

    seen: schemas that were yielded already
    """
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
    """Return a parameter's schema with only its type."""
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


_WHOLE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas"})
_WHOLE |= {"dependencies", "patternProperties", "minProperties", "maxProperties", "propertyNames"}
_TEXT = frozenset({"pattern", "format", "minLength", "maxLength", "allOf", "not", "if"})


class Parameter(NamedTuple):
    """One parameter of a tool. schema: complete, with the targets of its references"""

    name: str
    schema: Any
    required: bool


def parameters_of(
    schema: Mapping[str, Any], *, exact: bool = True, names: re.Pattern[str] | None = None
) -> list[Parameter]:
    """Return the parameters of a tool in order: first `properties`, then other required ones.

    exact: raise InvalidSchemaError (param tools) if the schema says more than the schemas of its parameters can; else
      ignore the rest if there are properties
    names: matches the names that the format can write; a parameter with another name is left out, or refused if exact
      and required
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
    for name in [name for name in used if names is not None and not names.fullmatch(name)]:
        if exact and name in needed:
            raise _error(f"a parameter named {name!r} cannot be written in this model's format of calls")
        del used[name]
    return [Parameter(name, _standing_alone(part, targets, place), name in needed) for name, part in used.items()]


def _targets(schema: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the definitions that a parameter's schema needs for its references, and their new place.

    It is computed once for all parameters, because there may be thousands, and as many definitions.
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

    exact: raise InvalidSchemaError (param tools) if a keyword limits it in another way; else ignore the keyword
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


MAX_CALLS = 64  # per output
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """A tool as the grammar sees it.

    schema: schema of the parameters of a function; None: it has no parameters, as at OpenAI
    strict: as at OpenAI: the schema is enforced in auto mode too, and objects are closed. If it is False, keywords that
        cannot be enforced are left out.
    custom: a custom tool, whose input is any text, or matches `regex` or `lark`
    """

    name: str
    schema: Mapping[str, Any] | None = None
    strict: bool = False
    custom: bool = False
    regex: str | None = None
    lark: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether all of the schema is enforced."""
        return self.strict or self.custom

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments. A custom tool has an object with one text, "input"."""
        if self.custom:
            text = {"type": "string"} if self.regex is None else {"type": "string", "pattern": f"^({self.regex})$"}
            return {
                "type": "object",
                "properties": {"input": text},
                "required": ["input"],
                "additionalProperties": False,
            }
        if self.schema is None:
            return NO_ARGUMENTS
        schema = {**self.schema, "type": "object"}
        if self.strict:
            return closed(schema)
        check_source(json.dumps(schema), "tools")  # takes less time than the code after it
        check_depth(schema)
        return loosened(schema)

    @property
    def outlined(self) -> GrammarTool:
        """The tool with the outline of its schema, which can always be enforced; the tool itself if it is exact."""
        return self if self.is_exact or self.schema is None else replace(self, schema=outline(self.schema))


@dataclass(frozen=True, slots=True)
class CallModel:
    """The properties of a model on which the grammar of calls depends.

    family: format of text/tools (None: calls as plain JSON, parsed by the "json" family)
    template: the chat template's text, for families that have several formats
    special_tokens: text -> id of the tokenizer's special tokens
    """

    family: str | None
    template: str = ""
    special_tokens: Mapping[str, int] = field(default_factory=dict)


def tool_grammar(
    model: CallModel,
    tools: Sequence[GrammarTool],
    *,
    required: bool,
    parallel: bool = True,
    answer: Mapping[str, Any] | bool | None = None,
    limited: bool = False,
) -> GrammarSpec | None:
    """Return the grammar of a request's tool choice; None if nothing needs to be enforced.

    required: at least one call and nothing else. False: auto mode, in which strict tools and custom tools with a format
      are enforced
    parallel: more than one call is allowed
    answer: JSON schema of an answer; the output is calls or this answer. Only in auto mode.
    limited: the model sees tools that it may not call, so a call must name one of `tools`

    Raises InvalidSchemaError (param tools).
    """
    if not tools:
        raise InvalidSchemaError("there are no tools to call", param="tools")
    bound = limited or answer is not None or not parallel
    bound = bound or any(tool.strict or tool.regex or tool.lark for tool in tools)
    if not required and not bound:
        return None
    if is_raw_input(tools, required=required):
        return GrammarSpec(kind="lark", source=tools[0].lark or "")
    calls = _calls_of(model.family, model.template)
    is_value = answer is not None and isinstance(calls.call, JsonCall) and not calls.trigger
    builder = _Builder(LarkWriter(model.special_tokens), calls, tools, parallel and not calls.single, is_value)
    try:
        start = _start(builder, required, answer)
    except RecursionError as error:
        raise InvalidSchemaError("the schema of a tool is nested too deep", param="tools") from error
    return GrammarSpec(kind="lark", source=builder.writer.finish(start))


def _start(builder: _Builder, required: bool, answer: Mapping[str, Any] | bool | None) -> str:
    if builder.format.channels is not None:
        return builder.messages(builder.format.channels, required, answer)
    if answer is not None:
        return f"{builder.required()} | {builder.writer.schema(answer)}"
    return builder.required() if required else builder.auto()


def no_call_grammar(model: CallModel) -> GrammarSpec | None:
    """Return the grammar of a text in which no call begins; None for a model without a format of calls."""
    if model.family is None:
        return None
    calls = _calls_of(model.family, model.template)
    writer = LarkWriter(model.special_tokens)
    if calls.channels is not None:
        start = _Builder(writer, calls, (), parallel=False, is_value=False).messages(calls.channels, False, None)
    elif calls.trigger:
        start = writer.text_without([calls.trigger])
    else:
        start = writer.rule(f"{ANY_TEXT} & ~{_OPENS_CALL}", terminal=True)
    return GrammarSpec(kind="lark", source=writer.finish(start))


def is_raw_input(tools: Sequence[GrammarTool], *, required: bool) -> bool:
    """Return whether the output is the input of the only tool, without a call around it."""
    return required and len(tools) == 1 and tools[0].lark is not None


@dataclass
class _Builder:
    """Writes the calls of an output. is_value: calls begin like the JSON answer that may stand in their place."""

    writer: LarkWriter
    format: CallFormat
    tools: Sequence[GrammarTool]
    parallel: bool
    is_value: bool

    def required(self) -> str:
        """Match calls, optionally after the line breaks that follow closed reasoning."""
        return f"(/[ \\n]{{1,2}}/)? {self._calls(0)}"

    def auto(self) -> str:
        """Match free text with optional calls. The text before a call ends with the trigger, its first characters."""
        trigger = self.format.trigger
        if not trigger:
            return f"{self._calls(0)} | {self.writer.rule(_NO_CALL, terminal=True)}"
        tail = self.writer.text_without([trigger])
        return f"{self.writer.text_until(trigger)} {self._calls(len(trigger))} {tail} | {tail}"

    def messages(self, channels: Channels, required: bool, answer: Mapping[str, Any] | bool | None) -> str:
        """Match messages on channels. Reasoning may come first; in auto mode an answer may replace the calls.

        Without tools there is no call.
        """
        writer, calls = self.writer, [self._calls(0)] if self.tools else []
        thought = f"{writer.literal(channels.thought)} {writer.text_until(channels.thought_end)}"
        first = writer.rule(f"{thought} {writer.literal(channels.again)}")
        text = writer.text() if answer is None else writer.schema(answer)
        final = writer.rule(f"{writer.literal(channels.answer)} {text}")
        return f"{first}? {one_of(calls if required else [*calls, final])}"

    def _calls(self, skip: int) -> str:
        form, writer = self.format, self.writer
        first = self._any_call(0 if form.open else skip)
        more = ""
        if self.parallel:
            again = self._any_call(0) if skip and not form.open else first
            more = f"({writer.literal(form.separator)} {again}){{0,{MAX_CALLS - 1}}}"
        return writer.rule(f"{writer.literal(form.open[skip:])} {first} {more} {writer.literal(form.close)}")

    def _any_call(self, skip: int) -> str:
        try:
            return self.writer.rule(one_of([self._call(tool, skip) for tool in self.tools]))
        except InvalidSchemaError as error:  # about a part that a format of answers may have too
            raise InvalidSchemaError(error.message, param="tools") from None

    def _call(self, tool: GrammarTool, skip: int) -> str:
        """Match one call, without the first `skip` characters of its text, which have been matched already."""
        match self.format.call:
            case JsonCall() as call if self.is_value and tool.lark is None:
                return _json_value(call, self.writer, tool)
            case JsonCall() as call:
                return _json_call(call, self.writer, tool, skip)
            case NamedCall() as call:
                return _named_call(call, self.writer, tool, skip)
            case TaggedCall() as call:
                return _tagged_call(call, self.writer, tool, skip)
            case PythonCall():
                return _python_call(self.writer, tool)
            case NotedCall() as call:
                return _noted_call(call, self.writer, tool, skip)


_OPENS_CALL = r"/\s*(\[?\s*\{\s*\"name\"|\[\s*[A-Za-z_][\w.]*\()(.|\n)*/"  # in formats without a trigger
_NO_CALL = r"/([^\s{\[<](.|\n)*)?/"  # an answer that cannot be mistaken for a call


def _calls_of(family: str | None, template: str) -> CallFormat:
    if (name := family or "json") not in TOOL_FORMATS:
        raise InvalidSchemaError(f"calls of the family {name!r} cannot be enforced", param="tool_choice")
    return TOOL_FORMATS[name].calls_in(template)


def _around(writer: LarkWriter, before: str, middle: str, after: str) -> str:
    return writer.rule(f"{writer.literal(before)} {middle} {writer.literal(after)}")


def _arguments(writer: LarkWriter, tool: GrammarTool) -> str:
    """Match the JSON object of a call's arguments."""
    if tool.lark is None:
        return writer.schema(tool.arguments_schema, exact=tool.is_exact)
    return _around(writer, '{"input": "', embed_in_json(writer, tool.lark), '"}')


def _json_call(call: JsonCall, writer: LarkWriter, tool: GrammarTool, skip: int) -> str:
    head = f'{call.before}{{"name": {json.dumps(tool.name)}, "{call.arguments}": '
    return _around(writer, head[skip:], _arguments(writer, tool), "}" + call.after)


def _json_value(call: JsonCall, writer: LarkWriter, tool: GrammarTool) -> str:
    """Match a call as a JSON value: the lexer does not backtrack from a literal that begins like the other value."""
    schema, arguments = tool.arguments_schema, call.arguments
    properties = {"name": {"const": tool.name}, arguments: moved(schema, f"#/properties/{arguments}")}
    value = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    whole = {"$schema": schema["$schema"], **value} if "$schema" in schema else value
    return writer.schema(whole, exact=tool.is_exact)


def _named_call(call: NamedCall, writer: LarkWriter, tool: GrammarTool, skip: int) -> str:
    head, index, rest = call.before.partition("INDEX")
    head = writer.literal(head.replace("NAME", tool.name)[skip:])
    if index:
        head = f"{head} /[0-9]{{1,3}}/ {writer.literal(rest)}"
    return writer.rule(f"{head} {_arguments(writer, tool)} {writer.literal(call.after)}")


# names of parameters that the parsers read back
_TAGGED_NAME = re.compile(r"(?!['\s])[^<>\"\n]{1,256}(?<!['\s])")
_PYTHON_NAME = re.compile(r"[A-Za-z_]\w*")


def _custom_input(writer: LarkWriter, tool: GrammarTool, after: str, ends: Sequence[str]) -> str | None:
    """Match the input of a custom tool that has a grammar, and the tag behind it. ends: as in TaggedCall."""
    if tool.lark is not None:
        return f"{embed_before(writer, tool.lark, after, ends)} {writer.literal(after)}"
    return None if tool.regex is None else writer.matching_until(tool.regex, after, ends)


def _tagged_call(call: TaggedCall, writer: LarkWriter, tool: GrammarTool, skip: int) -> str:
    ends = (call.after.strip(), *call.ends)
    parts = [writer.literal(call.head.replace("NAME", tool.name)[skip:])]
    before, after_key = call.before.split("KEY")
    for name, schema, required in parameters_of(tool.arguments_schema, exact=tool.is_exact, names=_TAGGED_NAME):
        behind = writer.literal(after_key.replace("TEXT", json.dumps(is_text(schema))))
        value = _custom_input(writer, tool, call.after, ends) or _value(writer, call, schema, ends, exact=tool.is_exact)
        parameter = writer.rule(f"{writer.literal(before)} {quoted(name)} {behind} {value}")
        parts.append(parameter if required else f"{parameter}?")
    return writer.rule(" ".join([*parts, writer.literal(call.tail)]))


def _value(writer: LarkWriter, call: TaggedCall, schema: Any, ends: Sequence[str], *, exact: bool) -> str:
    """Match one value and its closing text. Strings are written without quotes, anything else as JSON.

    A text that the parser may read as more than one value cannot be written. ends: as in TaggedCall
    """
    after = call.after
    if not is_text(schema):
        return f"{writer.schema(schema, exact=exact)} {writer.literal(after)}"
    texts = texts_of(schema, exact=exact)
    values = [quoted(text) for text in texts or () if not any(end.strip() in text for end in ends)]
    if values:
        return f"{one_of(values)} {writer.literal(after)}"
    if texts is not None and exact:
        raise _error("no value of a text parameter can be written in this model's format")
    return writer.text_until(after, without=call.closed_by)


def _python_call(writer: LarkWriter, tool: GrammarTool) -> str:
    """Match f(a=1, b="x"), with the parameters in the order of the schema."""
    parameters = parameters_of(tool.arguments_schema, exact=tool.is_exact, names=_PYTHON_NAME)
    values = [
        _around(writer, 'input="', embed_in_json(writer, tool.lark), '"')
        if tool.lark is not None
        else writer.rule(f"{quoted(name + '=')} {_python_value(writer, part, exact=tool.is_exact)}")
        for name, part, _ in parameters
    ]
    return _around(writer, f"{tool.name}(", _listed(writer, ", ", values, parameters), ")")


def _listed(writer: LarkWriter, separator: str, values: Sequence[str], parameters: Sequence[Parameter]) -> str:
    """Match the parameters in order, with `separator` between them; one that is not required may be left out."""
    comma, empty = quoted(separator), '""'
    rest = {"": "", comma: ""}  # the later parameters, by the separator before them
    for value, (_, _, required) in zip(reversed(values), reversed(parameters), strict=True):
        written = {before: f"{before} {value} {rest[comma]}" for before in rest}
        rest = {
            before: writer.rule(text if required else f"{text} | {rest[before] or empty}")
            for before, text in written.items()
        }
    return rest[""]


def _python_value(writer: LarkWriter, schema: Any, *, exact: bool) -> str:
    if isinstance(schema, dict) and schema.get("type") == "boolean":
        return '("True" | "False")'
    return writer.schema(schema, exact=exact)


_NOTED_NAME = re.compile(r"""(?![\s<},])[^:"\n]{1,256}(?<!\s)""")
_MOST_LEVELS = 16  # of schemas in schemas
_FREE_LEVELS = 4  # of values whose schema says nothing about them
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_UNNOTED = frozenset({"uniqueItems", "prefixItems", "contains", "minContains", "maxContains", "allOf", "not", "if"})


def _noted_call(call: NotedCall, writer: LarkWriter, tool: GrammarTool, skip: int) -> str:
    """Match a call in Gemma's notation, with the parameters in the order of the schema."""
    head = writer.literal(call.before.replace("NAME", tool.name)[skip:])
    own = _custom_input(writer, tool, call.mark, (call.mark,))
    if own is None:
        values = _Noted(call.mark, writer, tool.is_exact).members(tool.arguments_schema, 0)
    else:
        values = _around(writer, "{input:" + call.mark, own, "}")
    return writer.rule(f"{head} {values} {writer.literal(call.after)}")


@dataclass
class _Noted:
    """Writes values in Gemma's notation, which are JSON but for keys without quotes and texts between marks.

    exact: a schema that cannot be said is refused; else any value matches it
    open_references: the `$ref` whose targets are being written
    """

    mark: str
    writer: LarkWriter
    exact: bool
    open_references: set[str] = field(default_factory=set)

    def members(self, schema: Mapping[str, Any], level: int) -> str:
        """Match an object with the properties of a schema."""
        parameters = parameters_of(schema, exact=self.exact, names=_NOTED_NAME)
        written = [
            self.writer.rule(f"{quoted(name + ':')} {self.value(part, part, level + 1)}")
            for name, part, _ in parameters
        ]
        return _around(self.writer, "{", _listed(self.writer, ",", written, parameters), "}")

    def value(self, schema: Any, root: Any, level: int) -> str:
        """Match a value of a schema. root: the schema that references point into"""
        if level > _MOST_LEVELS:
            raise _error("the schema of a tool is nested too deep, or refers to itself")
        if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            if reference in self.open_references and not self.exact:
                return self._any(only_objects=False)
            self.open_references.add(reference)
            value = self.value(pointed(root, reference), root, level + 1)
            self.open_references.discard(reference)
            return value
        if self._is_json(schema, root, 0):
            return self.writer.schema(_completed(schema, root), exact=self.exact)
        if self.exact and isinstance(schema, dict) and (unkept := sorted(_UNNOTED & schema.keys())):
            raise _error(f"{', '.join(unkept)} of a parameter cannot be enforced in this model's format of calls")
        if is_text(schema):
            return self._text(schema)
        options = self._options(schema)
        if options:
            return self.writer.rule(one_of([self.value(option, root, level + 1) for option in options]))
        types = schema_types(schema, root)
        if types == {"array"}:
            return self._items(schema, root, level)
        if types == {"object"} and schema.get("properties"):
            return self.members(_completed(schema, root), level)
        limited = isinstance(schema, dict) and not {"enum", "const"}.isdisjoint(schema)
        if self.exact and (types - {"object"} or limited):
            raise _error("such a parameter cannot be enforced in this model's format of calls")
        return self._any(only_objects=types == {"object"})

    def _is_json(self, schema: Any, root: Any, level: int) -> bool:
        """Return whether all values of a schema are written as in JSON: no text and no object is among them."""
        if not isinstance(schema, dict) or level > _MOST_LEVELS:
            return False
        types, items = schema_types(schema, root) - {"indirect"}, schema.get("items")
        if types == {"other"} and isinstance(schema.get("enum"), list):
            return all(value is None or isinstance(value, int | float) for value in schema["enum"])
        plain = types == {"array"} and "prefixItems" not in schema and "$ref" not in schema
        return bool(types) and (types <= _SCALARS or (plain and self._is_json(items, root, level + 1)))

    def _text(self, schema: Any) -> str:
        mark, texts = self.writer.literal(self.mark), texts_of(schema, exact=self.exact)
        values = [quoted(text) for text in texts or () if self.mark not in text]
        if values:
            return self.writer.rule(f"{mark} {one_of(values)} {mark}")
        if texts is not None and self.exact:
            raise _error("no value of a text parameter can be written in this model's format")
        return self.writer.rule(f"{mark} {self.writer.text_until(self.mark)}")

    def _options(self, schema: Any) -> list[Any]:
        """Return the alternatives of a schema, each of one type; none if there is only one."""
        if not isinstance(schema, dict):
            return []
        found = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
        if found is not None:
            return found
        types, values = schema.get("type"), schema.get("enum")
        if isinstance(values, list):
            texts = [value for value in values if isinstance(value, str)]
            others = [value for value in values if value is None or isinstance(value, int | float)]
            split = [{"enum": texts}, {"enum": others}] if texts and others else []
            return split if len(texts) + len(others) == len(values) else []
        return [{**schema, "type": each} for each in types] if isinstance(types, list) and len(types) > 1 else []

    def _items(self, schema: Mapping[str, Any], root: Any, level: int) -> str:
        item = self.value(schema.get("items", True), root, level + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        some = f"{item} {more}"
        return self.writer.rule(f'"[" {some if least else f"({some})?"} "]"')

    def _any(self, *, only_objects: bool) -> str:
        """Match any value, or any object, of at most _FREE_LEVELS levels."""
        writer, mark = self.writer, self.writer.literal(self.mark)
        text = writer.rule(f"{mark} {writer.text_until(self.mark)}")
        value = members = one_of([text, writer.schema({"type": sorted(_SCALARS)})])
        for _ in range(_FREE_LEVELS):
            member = writer.rule(f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {value}')
            members = writer.rule(f'"{{" ({member} ("," {member})*)? "}}"')
            value = writer.rule(one_of([value, f'"[" ({value} ("," {value})*)? "]"', members]))
        return members if only_objects else value


def _completed(schema: Any, root: Any) -> Any:
    """Return a part of a schema with the targets of its references."""
    targets = {key: root[key] for key in ("$schema", "$defs", "definitions") if isinstance(root, dict) and key in root}
    return targets | schema if isinstance(schema, dict) else schema
