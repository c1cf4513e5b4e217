"""Grammars for tool calls, in the format that the model family writes and text/tools/ parses.

required (or a named tool): the output consists only of calls. auto: free text; once a call begins, it must name a
tool of the request and match its schema.

A custom tool is written as a function with one text parameter "input", whose value must match the tool's regex or
Lark grammar (`embed`). If a tool with a Lark grammar is the only one and required, the output is the input itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.embed import embed_before, embed_in_json
from jaxserve.grammar.lark import ANY_TEXT, LarkWriter, one_of
from jaxserve.grammar.schema.loose import loosened, outline
from jaxserve.grammar.schema.parameters import is_text, parameters_of, texts_of
from jaxserve.grammar.schema.parts import moved
from jaxserve.grammar.translate import check_depth, check_source, closed
from jaxserve.text.tools.format import CallFormat, JsonCall, NamedCall, PythonCall, TaggedCall
from jaxserve.text.tools.registry import HARMONY, HARMONY_CALLS, TOOL_FORMATS
from jaxserve.types.sampling import GrammarSpec

MAX_CALLS = 64  # per output
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """A tool as the grammar sees it.

    schema: of the parameters of a function; None takes any object
    strict: OpenAI's: the schema is enforced in auto mode too, and objects are closed. Of another schema, what cannot be
        enforced is left out: agents bring many tools, whose schemas others wrote.
    custom: a custom tool; its input is any text, or matches `regex` or `lark`
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
        """The JSON schema of the arguments; of a custom tool an object with one text, "input"."""
        if self.custom:
            text = {"type": "string"} if self.regex is None else {"type": "string", "pattern": f"^({self.regex})$"}
            return {
                "type": "object",
                "properties": {"input": text},
                "required": ["input"],
                "additionalProperties": False,
            }
        schema = dict(self.schema) if self.schema else ANY_ARGUMENTS
        schema = {**schema, "type": "object"}
        if self.strict:
            return closed(schema)
        check_source(json.dumps(schema), "tools")  # takes less time than what follows
        check_depth(schema)
        return loosened(schema)

    @property
    def outlined(self) -> GrammarTool:
        """The tool with no more of its schema than can be enforced of any; itself if it is exact."""
        return self if self.is_exact or self.schema is None else replace(self, schema=outline(self.schema))


@dataclass(frozen=True, slots=True)
class CallModel:
    """What the grammar of calls depends on besides the request.

    family: of text/tools (None: calls as plain JSON, parsed by the "json" family)
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

    required: at least one call and nothing else. Otherwise auto: strict tools and custom tools with a format are
    enforced.
    parallel: more than one call is allowed
    answer: JSON schema of an answer; the output is calls or this answer. Only in auto mode.
    limited: the model sees tools that it may not call, so a call is enforced to name one of `tools`
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
        start = _start(builder, model.family, required, answer)
    except RecursionError as error:
        raise InvalidSchemaError("the schema of a tool is nested too deep", param="tools") from error
    return GrammarSpec(kind="lark", source=builder.writer.finish(start))


def _start(builder: _Builder, family: str | None, required: bool, answer: Mapping[str, Any] | bool | None) -> str:
    if family == HARMONY:
        return builder.channels(required, answer)
    if answer is not None:
        return f"{builder.required()} | {builder.writer.schema(answer)}"
    return builder.required() if required else builder.auto()


def no_call_grammar(model: CallModel) -> GrammarSpec | None:
    """Return the grammar of a text in which no call begins; None for a model without a format of calls."""
    if model.family is None:
        return None
    calls = _calls_of(model.family, model.template)
    writer = LarkWriter(model.special_tokens)
    if model.family == HARMONY:
        start = _Builder(writer, calls, (), parallel=False, is_value=False).channels(False, None)
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
        """Match free text with optional calls. The text before them ends with the trigger, the first characters of a
        call.
        """
        trigger = self.format.trigger
        if not trigger:
            return f"{self._calls(0)} | {self.writer.rule(_NO_CALL, terminal=True)}"
        tail = self.writer.text_without([trigger])
        return f"{self.writer.text_until(trigger)} {self._calls(len(trigger))} {tail} | {tail}"

    def channels(self, required: bool, answer: Mapping[str, Any] | bool | None) -> str:
        """Harmony's channels: reasoning may come first; in auto mode an answer may replace the call. Without tools
        there is no call.
        """
        writer, calls = self.writer, [self._calls(0)] if self.tools else []
        analysis = f"{writer.literal('<|channel|>analysis<|message|>')} {writer.text_until('<|end|>')}"
        first = writer.rule(f"{analysis} {writer.literal('<|start|>assistant')}")
        text = writer.text() if answer is None else writer.schema(answer)
        final = writer.rule(f"{writer.literal('<|channel|>final<|message|>')} {text}")
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
        except InvalidSchemaError as error:  # of a part that a format of answers may have too
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


_OPENS_CALL = r"/\s*(\[?\s*\{\s*\"name\"|\[\s*[A-Za-z_][\w.]*\()(.|\n)*/"  # of the formats without a trigger
_NO_CALL = r"/([^\s{\[<](.|\n)*)?/"  # an answer that cannot be mistaken for a call


def _calls_of(family: str | None, template: str) -> CallFormat:
    if family == HARMONY:
        return HARMONY_CALLS
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


def _custom_input(writer: LarkWriter, tool: GrammarTool, before: str, after: str, ends: Sequence[str]) -> str | None:
    """Match the input of a custom tool that has a grammar, written between two tags. ends: as in TaggedCall."""
    if tool.lark is not None:
        return _around(writer, before, embed_before(writer, tool.lark, after, ends), after)
    if tool.regex is not None:
        return writer.rule(f"{writer.literal(before)} {writer.matching_until(tool.regex, after, ends)}")
    return None


def _tagged_call(call: TaggedCall, writer: LarkWriter, tool: GrammarTool, skip: int) -> str:
    ends = (call.after.strip(), *call.ends)
    parts = [writer.literal(call.head.replace("NAME", tool.name)[skip:])]
    for name, schema, required in parameters_of(tool.arguments_schema, exact=tool.is_exact):
        opening = call.before.replace("KEY", name).replace("TEXT", json.dumps(is_text(schema)))
        parameter = _custom_input(writer, tool, opening, call.after, ends)
        if parameter is None:
            value = _value(writer, call, schema, ends, exact=tool.is_exact)
            parameter = writer.rule(f"{writer.literal(opening)} {value}")
        parts.append(parameter if required else f"{parameter}?")
    return writer.rule(" ".join([*parts, writer.literal(call.tail)]))


def _value(writer: LarkWriter, call: TaggedCall, schema: Any, ends: Sequence[str], *, exact: bool) -> str:
    """Match one value and what closes it: strings are written without quotes, anything else as JSON.

    A text that the parser may read as more than one value cannot be written. ends: as in TaggedCall
    """
    after = call.after
    if not is_text(schema):
        return f"{writer.schema(schema, exact=exact)} {writer.literal(after)}"
    texts = texts_of(schema, exact=exact)
    if texts is None:
        return writer.text_until(after, without=call.closed_by)
    values = [writer.literal(text) or '""' for text in texts if not any(end.strip() in text for end in ends)]
    if not values:
        raise InvalidSchemaError("no value of a text parameter can be written in this model's format", param="tools")
    return f"{one_of(values)} {writer.literal(after)}"


def _python_call(writer: LarkWriter, tool: GrammarTool) -> str:
    """Match f(a=1, b="x"), with the parameters in the order of the schema."""
    parameters = parameters_of(tool.arguments_schema, exact=tool.is_exact)
    comma, empty = '", "', '""'
    values = [
        _around(writer, 'input="', embed_in_json(writer, tool.lark), '"')
        if tool.lark is not None
        else writer.rule(f"{writer.literal(name + '=')} {_python_value(writer, part, exact=tool.is_exact)}")
        for name, part, _ in parameters
    ]

    rest = {"": "", comma: ""}  # the parameters behind, by the separator before them
    for value, (_, _, required) in zip(reversed(values), reversed(parameters), strict=True):
        written = {separator: f"{separator} {value} {rest[comma]}" for separator in rest}
        rest = {
            separator: writer.rule(text if required else f"{text} | {rest[separator] or empty}")
            for separator, text in written.items()
        }
    return _around(writer, f"{tool.name}(", rest[""], ")")


def _python_value(writer: LarkWriter, schema: Any, *, exact: bool) -> str:
    if isinstance(schema, dict) and schema.get("type") == "boolean":
        return '("True" | "False")'
    return writer.schema(schema, exact=exact)
