"""The parts that all tool-call parsers share: the parser's frame, calls in JSON, and parameters as text.

    ToolParser     the frame of a streaming parser; a family's file gives `_calls`, a generator that reads an output
                   from its start
    InputDecoder   takes a custom tool's input out of the JSON arguments {"input": "..."} that the model writes for it
    ToolSet        the tools of a request
    schema_types   returns the JSON types that a parameter may have; `as_json` returns its text as JSON

Before a call's name is known nothing of it has been sent, and text that cannot be read becomes content. Afterwards a
broken call ends where it broke.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import unquote

from jaxserve.text.events import ContentDelta, Event, ToolCallDelta, ToolCallEnd, ToolCallStart, merged
from jaxserve.text.reader import Reading, TextReader, decode_json_string, json_rest, whole_characters
from jaxserve.text.tools.literals import parse_literal

logger = logging.getLogger(__name__)

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_MAX_START = 64
# an unfinished escape at the end: a backslash, part of \uXXXX, or a high surrogate that lacks its other half
_OPEN_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{0,3}|u[dD][89abAB][0-9A-Fa-f]{2}(\\(u[0-9A-Fa-f]{0,3})?)?)?$")


class InputDecoder:
    """Decodes the text of "input" as it streams. Arguments of another form are passed on as they are."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._raw = False
        self._done = False

    def feed(self, text: str) -> str:
        """Return the decoded text that these characters complete."""
        if self._raw or self._done:
            return text if self._raw else ""
        self._held += text
        if not self._inside:
            match = _START.match(self._held)
            if match is None or match.end() > _MAX_START:
                return self._pass_on() if len(self._held) > _MAX_START else ""
            self._inside, self._held = True, self._held[match.end() :]
        return self._decode()

    def finish(self) -> str:
        """Return the rest of the text if the arguments ended early or have another form."""
        if self._done or self._raw:
            return ""
        if not self._inside:
            return self._other_form()
        return _unescape(_OPEN_ESCAPE.sub("", self._held))

    def _decode(self) -> str:
        end = _END.match(self._held)
        if end is not None:
            self._done = True
            return _unescape(end[0][:-1])
        tail = _OPEN_ESCAPE.search(self._held[-12:])
        cut = len(self._held) - (len(tail[0]) if tail and not _escaped(self._held, len(tail[0])) else 0)
        ready, self._held = self._held[:cut], self._held[cut:]
        return _unescape(ready)

    def _pass_on(self) -> str:
        self._raw = True
        return self._held

    def _other_form(self) -> str:
        try:
            value = json.loads(self._held)
        except (ValueError, RecursionError):
            return self._held
        text = value.get("input") if isinstance(value, dict) else None
        return text if isinstance(text, str) else "" if value == {} else self._held


def _escaped(text: str, tail: int) -> bool:
    """Return whether the backslash that begins the last `tail` characters is itself escaped."""
    head = text[: len(text) - tail]
    return (len(head) - len(head.rstrip("\\"))) % 2 == 1


def unescaped_beginning(text: str) -> str:
    """Return the text of the beginning of a JSON string, given without its quote. A cut escape is left out."""
    tail = _OPEN_ESCAPE.search(text[-12:])
    return _unescape(text[: len(text) - len(tail[0])] if tail and not _escaped(text, len(tail[0])) else text)


def _unescape(text: str) -> str:
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text


MAX_JOIN_DEPTH = 8  # levels of schemas in schemas that are read
_MAX_DIGITS = 9  # digits of an index into a list


def schema_types(schema: Any, root: Any = None) -> set[str]:
    """Return the JSON types that a schema's values may have; empty if it does not name any.

    "other" is among them if an alternative names none, and "indirect" if a reference or allOf names them.

    root: the schema that references point into; default: the schema itself
    """
    return _types(schema, schema if root is None else root, {}, 0)


def _types(schema: Any, root: Any, known: dict[int, set[str]], depth: int) -> set[str]:
    """Return the types of a schema. known: types by the id of a schema

    Each schema is read once, because many references to one, or a loop, would multiply the time.
    """
    if not isinstance(schema, Mapping) or depth > MAX_JOIN_DEPTH:
        return set()
    if id(schema) not in known:
        known[id(schema)] = set()  # in a loop
        known[id(schema)] = _read_types(schema, root, known, depth)
    return known[id(schema)]


def _read_types(schema: Mapping[str, Any], root: Any, known: dict[int, set[str]], depth: int) -> set[str]:
    declared = schema.get("type")
    types = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    types = types or {"string" if isinstance(value, str) else "other" for value in values}
    if types:
        return types
    reference = schema.get("$ref")
    if isinstance(reference, str):
        types = _types(pointed(root, reference), root, known, depth + 1)
        return types and types | {"indirect"}
    for key in ("anyOf", "oneOf"):
        options = schema[key] if isinstance(schema.get(key), list) else []
        for option in itertools.filterfalse(_is_never, options):
            types |= _types(option, root, known, depth + 1) or {"other"}
    parts = schema["allOf"] if not types and isinstance(schema.get("allOf"), list) else []
    named = filter(None, (_types(part, root, known, depth + 1) for part in parts))
    return types or next((found | {"indirect"} for found in named), set())


def _is_never(schema: Any) -> bool:
    """Return whether no value satisfies the schema. Zod writes an optional parameter with such an alternative."""
    return schema is False or (isinstance(schema, Mapping) and schema.get("not") in ({}, True))


def pointed(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference of the form #/a/b (RFC 6901) names; None if it is missing."""
    if not reference.startswith("#"):
        return None
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and key.isdecimal() and len(key) <= _MAX_DIGITS and int(key) < len(root):
            root = root[int(key)]
        elif isinstance(root, Mapping) and key in root:
            root = root[key]
        else:
            return None
    return root


def as_json(text: str, types: Collection[str] = ()) -> str:
    """Return a parameter's text as JSON: the text itself if it is JSON of an allowed type, else a string.

    Python's words count as JSON, and so do Python's literals if an array or an object is allowed.
    """
    value = _value(text.strip(_JSON_SPACE), types)
    if value is _NO_VALUE:
        return json.dumps(text, ensure_ascii=False)
    if types and not _fits(value, types) and "string" in types:
        return json.dumps(text, ensure_ascii=False)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def as_object(text: str) -> str:
    """Return the JSON of a text that is an object in Python's notation; any other text as it is."""
    try:
        value = None if _is_json(text) else parse_literal(text)
    except ValueError:
        return text
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_of(text: str, types: Collection[str]) -> bool:
    """Return whether a parameter's text is a value of one of `types`. No type of them may accept any text."""
    if not types or not {"string", "other"}.isdisjoint(types):
        return False
    value = _value(text.strip(_JSON_SPACE), types)
    return value is not _NO_VALUE and _fits(value, types)


def is_value(text: str, types: Collection[str]) -> bool:
    """Return whether a parameter's text is a value in JSON, or in Python's notation if `types` allow that."""
    return _value(text.strip(_JSON_SPACE), types) is not _NO_VALUE


def _value(text: str, types: Collection[str]) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if text[:1] in _BRACKETS and not _BRACKETS[text[:1]].isdisjoint(types):
        try:
            return parse_literal(text)
        except ValueError:
            return _NO_VALUE
    return _PYTHON_WORDS.get(text, _NO_VALUE)


_JSON_SPACE = " \t\n\r"
_NO_VALUE = object()
_BRACKETS = {"[": {"array"}, "(": {"array"}, "{": {"object", "array"}}
_PYTHON_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
_KINDS: tuple[tuple[type, set[str]], ...] = (
    (bool, {"boolean"}),
    (int, {"integer", "number"}),
    (float, {"number"}),
    (str, {"string"}),
    (list, {"array"}),
    (dict, {"object"}),
)


def _fits(value: Any, types: Collection[str]) -> bool:
    kinds = next((names for kind, names in _KINDS if isinstance(value, kind)), {"null"})
    return bool(kinds & set(types)) or "other" in types


_NAME = re.compile(r"[^\s\"'<>{}\[\]()|]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request as parsers see them.

    parameters: name of a function to the JSON schema of its parameters
    custom: names of custom tools, which the prompt shows as functions with one text parameter "input"
    on_unoffered: called for each call of a tool that the request does not offer; the call becomes text
    """

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    custom: Collection[str] = ()
    on_unoffered: Callable[[], None] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.parameters or name in self.custom

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.parameters, *self.custom)

    def types(self, name: str, parameter: str) -> set[str]:
        """Return the JSON types that a parameter may have; empty if the schema does not say."""
        if name in self.custom:
            return {"string"}
        whole = self.parameters.get(name, {})
        return schema_types(self._properties(name).get(parameter), whole)

    def declares(self, name: str, parameter: str) -> bool:
        """Return whether the schema of a tool names a parameter."""
        return parameter == "input" if name in self.custom else parameter in self._properties(name)

    def allows(self, name: str, parameter: str) -> bool:
        """Return whether a tool may have a parameter of this name."""
        whole = self.parameters.get(name, {})
        is_closed = name in self.custom or (whole.get("additionalProperties") is False)
        return self.declares(name, parameter) or not is_closed or bool(whole.get("patternProperties"))

    def required(self, name: str) -> list[str]:
        """Return the parameters that a call of a tool must have."""
        names = ["input"] if name in self.custom else self.parameters.get(name, {}).get("required")
        return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []

    def named_by(self, keys: Collection[str]) -> str | None:
        """Return the only tool whose call may have exactly these parameters; None if there are several, or none."""
        fitting = [
            name
            for name in self.names
            if all(self.declares(name, key) for key in keys) and set(self.required(name)) <= set(keys)
        ]
        return fitting[0] if len(fitting) == 1 else None

    def _properties(self, name: str) -> Mapping[str, Any]:
        properties = self.parameters.get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}


class ToolParser(ABC):
    """A streaming parser of one family's tool calls. Each output needs its own object.

    is_whole: whether the model itself ended the output
    """

    # texts that the parser must see, even if they are special tokens
    markers: ClassVar[tuple[str, ...]] = ()
    call_ends: ClassVar[tuple[str, ...]] = ()  # texts that end a call, also one whose brackets the model left open

    def __init__(self, tools: ToolSet | None = None) -> None:
        self.tools = tools or ToolSet()
        self.reader = TextReader()
        self.num_calls = 0
        self._ids: set[str] = set()
        self.thinking = False  # the text read so far ends within reasoning
        self.is_whole = False
        self._events: list[Event] = []
        self._space: list[str] = []  # white space that is dropped if a call comes next
        self._trim = False  # white space that comes next follows a call and is dropped
        self._input: InputDecoder | None = None
        self.has_arguments = False
        self._marked = False  # a marker of the family was read, so the text after it is meant as a call
        self._run = self._calls()
        self._done = False

    @abstractmethod
    def _calls(self) -> Reading[None]:
        """Read the output, using the methods below. Text after the end of the generator is content."""

    def heads(self) -> Iterable[str]:
        """Return the beginnings of calls without white space. NAME stands for the name of a tool."""
        return ()

    def json_heads(self, begin: str) -> Iterable[str]:
        """Return the beginnings of calls in JSON: after `begin`, or beside another call."""
        return [f'{each}{{"name":"NAME"' for each in (begin, begin + "[", ",", ";", "")]

    def make_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def feed(self, delta: str) -> list[Event]:
        self.reader.push(delta)
        return self._advance()

    def finish(self, *, whole: bool = False) -> list[Event]:
        self.reader.closed, self.is_whole = True, whole
        events = self._advance()
        if self._space and not self.num_calls:
            events.append(ContentDelta("".join(self._space)))
        return merged(events)

    def _advance(self) -> list[Event]:
        if not self._done:
            try:
                next(self._run)
            except StopIteration:
                self._done = True
            except Exception:  # a parser's mistake must not end the request: the rest of the text is content
                logger.exception("tool parser %s failed", type(self).__name__)
                self._done = True
                self.content(self.reader.unmark())
        if self._done:
            self.content(self.reader.take_rest())
        events, self._events = self._events, []
        return merged(events)

    # --- building blocks for families

    def content(self, text: str) -> None:
        """Emit answer text. White space around calls is layout and is dropped."""
        text = text.lstrip() if self._trim else text
        stripped = text.rstrip()
        if stripped:
            self._events.append(ContentDelta("".join(self._space) + stripped))
            self._space, self._trim = [], False
        self._space.append(text[len(stripped) :])

    def content_until(self, *markers: str) -> Reading[str]:
        """Emit content up to the first of `markers`, which is returned and remembered for `give_up`; "" at the end."""
        marker = yield from self.reader.copy_until(markers, self.content, drop_partial=self.num_calls > 0)
        self._marked = bool(marker)
        if marker:
            self.reader.mark(marker)
        return marker

    def sections(
        self, begins: Sequence[str], call_begin: str, call: Callable[[], Reading[bool]], ends: Sequence[str]
    ) -> Reading[None]:
        """Read an output with sections of calls. `call` reads each call after its `call_begin`.

        After a section without a call, a `call_begin` is looked for outside of sections too.
        """
        while marker := (yield from self.content_until(*begins, call_begin)):
            if marker != call_begin:
                yield from self.reader.space()
                marker = yield from self.reader.accept(call_begin, drop_partial=True)
            if not marker or not (yield from call()):
                self.give_up()
                continue
            yield from self.reader.space()
            yield from self.reader.accept(*ends, drop_partial=True)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Emit the start of a call. If the model wrote an id twice, the second call gets another: results name it."""
        self.reader.unmark()
        if not call_id or call_id in self._ids:
            call_id = self.make_id()
        self._ids.add(call_id)
        self._space.clear()
        custom = name in self.tools.custom
        self._input = InputDecoder() if custom else None
        self.has_arguments = False
        self._events.append(ToolCallStart(self.num_calls, call_id, name, custom))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Emit the next characters of the call's JSON arguments."""
        self.has_arguments = True
        if self._input is not None:
            text = self._input.feed(text)
        if text:
            self._events.append(ToolCallDelta(self.num_calls - 1, whole_characters(text)))

    def end_call(self, *, whole: bool = True) -> None:
        """Emit the end of a call. whole: it did not break off, so without arguments it gets an empty object"""
        if whole and not self.has_arguments:
            self.arguments("{}")
        if self._input is not None and (rest := self._input.finish()):
            self._events.append(ToolCallDelta(self.num_calls - 1, whole_characters(rest)))
        self._events.append(ToolCallEnd(self.num_calls - 1))
        self._trim = True

    def offered(self, name: str) -> bool:
        """Return whether the request offers the tool `name`. A call of any other tool stays text."""
        if name in self.tools:
            return True
        if self._marked and _NAME.fullmatch(name) and self.tools.on_unoffered is not None:
            self.tools.on_unoffered()
        return False

    def give_up(self) -> None:
        """Emit the text since `mark` as content, but not the mere head of a call that was cut beside others."""
        text = self.reader.unmark()
        if not (self.was_cut and self._is_head(text)):
            self.content(text)

    def _is_head(self, text: str) -> bool:
        """Return whether a text that was cut is only the head of a call, which says nothing by itself."""
        cut = "".join(text.split())
        names = self.tools.names or ("",)
        heads = self.heads() if cut and self.num_calls else ()
        return any(head.replace("NAME", name).startswith(cut) for head in heads for name in names)

    def json_arguments(self) -> Reading[bool]:
        """Stream the arguments of the call that was started. Return False if they break off.

        A string is read as the JSON text in it. Brackets that the model left open when it ended the call are closed.
        """
        yield from self.reader.space()
        first = yield from self.reader.peek()
        if first not in ("{", "["):
            text = yield from self.reader.json_text()
            value = decode_json_string(text) if text and first in ("'", '"') else text
            if value and value != "null":
                self.arguments(value)
            return text is not None
        pieces: list[str] = []

        def sink(piece: str) -> None:
            pieces.append(piece)
            self.arguments(piece)

        whole = yield from self.reader.copy_json(sink)
        is_over = not whole and (self.ended_itself or (yield from self._call_ends()))
        rest = json_rest("".join(pieces)) if is_over else None
        if rest is not None:
            self.arguments(rest)
        return whole or rest is not None

    def _call_ends(self) -> Reading[bool]:
        """Look ahead: return whether one of `call_ends` comes next."""
        if not self.call_ends:
            return False
        return bool((yield from self.reader.ahead(self.reader.accept(*self.call_ends))))

    @property
    def ended_itself(self) -> bool:
        """Whether the text is over because the model ended it."""
        return self.reader.ended and self.is_whole

    @property
    def was_cut(self) -> bool:
        """Whether the text is over because the token limit or a stop string cut it."""
        return self.reader.ended and not self.is_whole

    def skip_braces(self) -> Reading[None]:
        """Take superfluous closing braces."""
        while (yield from self.reader.accept("}", " ", "\n", "\t", "\r")):
            pass

    def json_call(self) -> Reading[bool]:
        """Read {"name": ..., "arguments": {...}} in any order of keys, also inside {"function": {...}}.

        Returns True if a call was started (and ended, perhaps broken), False if nothing was sent.
        """
        if not (yield from self.reader.accept("{")):
            return False
        return (yield from _JsonCall(self).read())

    def json_calls(self, *ends: str) -> Reading[bool]:
        """Read calls, perhaps with "," or ";" between them, and one of `ends`. Return whether there was any call.

        An object behind them that is not a call is content.
        """
        started = False
        while (yield from self.json_call()):
            started = True
            self.reader.mark()
            yield from self.reader.space()
            yield from self.reader.accept(";", ",")
            yield from self.reader.space()
            if ends and ((yield from self.reader.accept(*ends, drop_partial=True)) or self.reader.ended):
                self.reader.unmark()
                return True
            if (yield from self.reader.peek()) != "{":
                break
        if started:
            self.give_up()
        return started

    def json_call_list(self) -> Reading[bool]:
        """Read [call, call, ...] after its opening bracket. Return whether any call was started."""
        started = False
        while True:
            yield from self.reader.space()
            if (yield from self.reader.accept("]")):
                return started
            if started:
                self.reader.mark()
                yield from self.reader.accept(",")
                yield from self.reader.space()
            if not (yield from self.json_call()):
                if started:
                    self.give_up()
                return started
            started = True


class _JsonCall:
    """One call written as a JSON object whose opening brace has been read.

    It is started when its arguments begin: an object with a name that cannot be read further is not a call. A call that
    a limit or a stop string cut after its name is started with its arguments so far.
    """

    NAMES = ("name", "tool_name", "function")
    ARGUMENTS = ("arguments", "parameters", "args", "tool_input")

    def __init__(self, parser: ToolParser) -> None:
        self.parser, self.reader = parser, parser.reader
        self.name: str | None = None
        self.started = False
        self.early: str | None = None  # arguments that came before the name
        self.others: dict[str, str] = {}  # other members, as JSON
        self.cut: tuple[str, str] | None = None  # key and JSON of the member that the end of the text cut off

    def read(self) -> Reading[bool]:
        """Read the call; return whether it was started."""
        whole = yield from self._members()
        if self.name is not None and not self.started:
            if whole:
                self._start_with_members(self.name)
            elif self.reader.ended:
                whole = self._start_cut(self.name)
        if self.started:
            self.parser.end_call(whole=whole)
            yield from self.parser.skip_braces()
        return self.started

    def _members(self) -> Reading[bool]:
        while True:
            yield from self.reader.space()
            if (yield from self.reader.accept("}")):
                return True
            if (yield from self.reader.accept(",")):
                continue
            key = yield from self.reader.json_string()
            yield from self.reader.space()
            if key is None or not (yield from self.reader.accept(":")):
                return False
            yield from self.reader.space()
            if not (yield from self._value(key)):
                return False

    def _value(self, key: str) -> Reading[bool]:
        first = yield from self.reader.peek()
        if key in self.NAMES and self.name is None and first in ("'", '"'):
            name = yield from self.reader.json_string()
            if name is None or not self.parser.offered(name):
                return False
            self.name = name
            return self.early is None or self._start(name, self.early)
        if key == "function" and first == "{" and not self.started:
            yield from self.reader.accept("{")
            return (yield from self._members())
        if key in self.ARGUMENTS and self.name is not None and not self.started and first == "{":
            self.parser.start_call(self.name)
            self.started = True
            return (yield from self.parser.json_arguments())
        pieces: list[str] = []
        whole = yield from self.reader.copy_json(pieces.append)
        text = "".join(pieces)
        if not whole:
            self.cut = key, text
            return False
        if key not in self.ARGUMENTS:
            self.others[key] = text
        elif self.name is not None and not self.started:
            return self._start(self.name, text)
        elif self.early is None:
            self.early = text
        return True

    def _start(self, name: str, arguments: str) -> bool:
        """Start the call with the JSON of its arguments. Return whether it was started.

        It is not if they are neither an object nor the text of one, nor a custom tool's input.
        """
        if arguments[:1] == '"':
            arguments = as_object(decode_json_string(arguments) or "")
        if not arguments or arguments == "null":
            arguments = "{}"
        if arguments.lstrip()[:1] != "{" and name not in self.parser.tools.custom:
            return False
        self.parser.start_call(name)
        self.parser.arguments(arguments)
        self.started = True
        return True

    def _start_with_members(self, name: str) -> None:
        """Start a call without arguments: its other members may be the parameters."""
        self._start(name, self._flat(name) + "}")

    def _start_cut(self, name: str) -> bool:
        """Start a call that the end of the text cut off; return whether its arguments are whole.

        If the model itself ended it so, it is a call only if the JSON of its arguments can be closed.
        """
        key, value = self.cut or ("", "")
        if key in self.ARGUMENTS:
            text = as_object(unescaped_beginning(value[1:])) if value[:1] == '"' else ""
            text = text if text.lstrip()[:1] == "{" or name in self.parser.tools.custom else ""
        else:
            if value and self.parser.tools.declares(name, key):
                self.others[key] = value
            text = self._flat(name)
            text = text if text != "{" else ""
        rest = json_rest(text) if self.parser.is_whole else ""
        if rest is None:
            return False
        self.parser.start_call(name)
        self.started = True
        if text:
            self.parser.arguments(text + rest)
        return self.parser.is_whole

    def _flat(self, name: str) -> str:
        """Return the members that are parameters as the JSON of an object that is not closed."""
        members = {key: text for key, text in self.others.items() if self.parser.tools.declares(name, key)}
        return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in members.items())
