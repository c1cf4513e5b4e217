"""Calls whose parameters are plain text between tags: Qwen3-Coder, GLM 4.5 and later, DeepSeek V3.2 and later.

The arguments are made into JSON while they stream. A parameter that the tool's schema declares a string is sent as it
comes, any other when it is complete.

A text may contain the tags of its own format. So a tag ends a value only if the structure of a call follows: the next
parameter, whose name must be one that the tool may have and that was not given yet, or the end of the call, or the end
of the output. A text that contains all of that cannot be told from the end of a value, and the first end counts.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading, json_rest
from jaxserve.text.tools.base import ToolParser, as_json, is_of, is_value
from jaxserve.text.tools.format import CallFormat, TaggedCall, ToolFormat

_MAX_KEY = 256
_NOT_IN_KEYS = ("<", "\n")


class Parameters(ABC):
    """Reads the parameters of one call of the tool `name`.

    opening: tag that begins a parameter
    closing: tag that ends a parameter
    call_tags: tags that end the call
    forgotten: tags that end a parameter if the model leaves out `closing`
    on_own_lines: a text has a line break at each end that does not belong to it
    """

    opening: ClassVar[str]
    closing: ClassVar[str]
    call_tags: ClassVar[tuple[str, ...]]
    forgotten: ClassVar[tuple[str, ...]] = ()
    on_own_lines: ClassVar[bool] = False

    def __init__(self, parser: ToolParser, name: str) -> None:
        self.parser, self.reader, self.name = parser, parser.reader, name
        self.given: set[str] = set()

    @abstractmethod
    def key(self) -> Reading[tuple[str, bool | None]]:
        """Read the rest of an opening tag.

        Returns the parameter's name, "" if it cannot be read, and whether the tag says that the value is a text; None
        if it does not say.
        """

    @abstractmethod
    def ends(self, tag: str) -> Reading[bool]:
        """Look ahead: return whether `tag`, which comes next, ends a value."""

    def read(self) -> Reading[bool]:
        """Read the parameters and send the call. Return False, with nothing sent, if they cannot be read."""
        yield from self.reader.space()
        if (yield from self.reader.peek()) == "{":
            return (yield from self._json_body())
        whole, started = True, False
        while whole and (yield from self.reader.accept(self.opening, drop_partial=started)):
            key, is_text = yield from self.key()
            if not (key or started or self.parser.was_cut):
                return False
            if not started:
                self.parser.start_call(self.name)
                started = True
            whole = bool(key) and (yield from self._parameter(key, is_text))
            yield from self.reader.space()
        if not started:
            return (yield from self._without())
        whole = whole and (self.parser.is_whole or not self.reader.ended)
        if whole:
            self.parser.arguments("}")
        self.parser.end_call(whole=whole)
        return True

    def _without(self) -> Reading[bool]:
        """Send a call without parameters if the model wrote one. Return whether it did."""
        is_call = yield from self.reader.ahead(self.reader.accept(*self.call_tags))
        if not is_call and not (self.parser.ended_itself and not self.parser.tools.required(self.name)):
            yield from self.reader.accept(self.opening, *self.call_tags, drop_partial=True)
            if not self.parser.was_cut:
                return False
        self.parser.start_call(self.name)
        self.parser.end_call(whole=not self.parser.was_cut)
        return True

    def _json_body(self) -> Reading[bool]:
        """Read parameters that the model wrote as a JSON object."""
        pieces: list[str] = []
        whole = yield from self.reader.copy_json(pieces.append)
        text = "".join(pieces)
        if not whole and not self.parser.was_cut:
            rest = json_rest(text) if self.parser.ended_itself else None
            if rest is None:
                return False
            text, whole = text + rest, True
        yield from self.reader.space()
        ends = (yield from self.reader.ahead(self.reader.accept(*self.call_tags))) or self.reader.ended
        if not ends or (whole and json_rest(text) != ""):
            return False
        self.parser.start_call(self.name)
        self.parser.arguments(text)
        self.parser.end_call(whole=whole)
        return True

    def _parameter(self, key: str, is_text: bool | None) -> Reading[bool]:
        """Send one parameter after its opening tag. Return False if it was cut off. A repeated name is skipped."""
        types = self.parser.tools.types(self.name, key)
        if key in self.given:
            yield from self._value(types)
        else:
            comma = ", " if self.given else "{"
            self.given.add(key)
            self.parser.arguments(comma + json.dumps(key, ensure_ascii=False) + ": ")
            if self.on_own_lines:
                yield from self.reader.accept("\n")
            if is_text or (is_text is None and types == {"string"}):
                whole = yield from self._stream_text()
            else:
                value = yield from self._value(types)
                whole = value is not None
                self.parser.arguments("" if value is None else as_json(value, types))
            if not whole:
                return False
        yield from self.reader.accept(self.closing, drop_partial=True)
        return True

    def _stream_text(self) -> Reading[bool]:
        """Send a text as a JSON string while it comes. Return False if it was cut off."""
        self.parser.arguments('"')
        held = ""

        def send(piece: str) -> None:
            nonlocal held
            piece = held + piece
            held = "\n" if self.on_own_lines and piece.endswith("\n") else ""
            piece = piece.removesuffix(held)
            if piece:
                self.parser.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])

        tags = (self.closing, *self.forgotten)
        while tag := (yield from self.reader.copy_until(tags, send, take=False, drop_partial=True)):
            if (yield from self.reader.ahead(self.ends(tag))):
                break
            send(self.reader.take_one())
        if not tag and not self.parser.is_whole:
            return False
        self.parser.arguments('"')
        return True

    def _value(self, types: set[str]) -> Reading[str | None]:
        """Take the text of a value that may be JSON; None if it was cut off.

        The line break before its end is dropped if it does not belong to the value. A tag within a string of an array
        or object is part of it, if the value turns out to be one.
        """
        pieces: list[str] = []
        strings = _Strings()
        first: int | None = None  # number of pieces at the first end that lies within a string

        def take(piece: str) -> None:
            pieces.append(piece)
            strings.feed(piece)

        tags = (self.closing, *self.forgotten)
        while tag := (yield from self.reader.copy_until(tags, take, take=False, drop_partial=True)):
            is_end = yield from self.reader.ahead(self.ends(tag))
            if is_end and not strings.inside:
                break
            if is_end and first is None:
                first = len(pieces)
            if tag == self.closing and not strings.inside and is_of("".join(pieces), types):
                break
            take(self.reader.take_one())
        value = "".join(pieces)
        if first is not None and not (tag and is_value(value, types)):
            self.reader.put_back("".join(pieces[first:]))
            tag, value = self.closing, "".join(pieces[:first])
        if not tag and not self.parser.is_whole:
            return None
        return value.removesuffix("\n") if self.on_own_lines else value

    def _may_come(self, key: str) -> bool:
        return bool(key) and key not in self.given and self.parser.tools.allows(self.name, key)


class _Strings:
    """Follows the strings of a value if the value begins like one of JSON or Python."""

    def __init__(self) -> None:
        self._begun = False
        self._quote = ""
        self._escaped = False
        self._counts = False

    @property
    def inside(self) -> bool:
        """Whether the text so far ends within a string."""
        return bool(self._quote)

    def feed(self, text: str) -> None:
        """Follow the next text of the value."""
        if not self._begun and (start := text.lstrip()):
            self._begun, self._counts = True, start[0] in '[{"'
        for char in text if self._counts else "":
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char


class QwenParameters(Parameters):
    """<parameter=x>
    1
    </parameter></function></tool_call>

    wrapped: the call began with <tool_call>
    """

    opening, closing = "<parameter=", "</parameter>"
    call_tags = ("</function>", "</tool_call>")
    forgotten = ("\n<parameter=", "\n</function>")
    on_own_lines = True

    def __init__(self, parser: ToolParser, name: str, *, wrapped: bool) -> None:
        super().__init__(parser, name)
        self._wrapped = wrapped

    def key(self) -> Reading[tuple[str, bool | None]]:
        key, end = yield from self.reader.until(">", *_NOT_IN_KEYS, limit=_MAX_KEY)
        return (key.strip().strip("\"'") if end == ">" else ""), None

    def ends(self, tag: str) -> Reading[bool]:
        yield from self.reader.accept(tag)
        if tag == "\n<parameter=":
            key, _ = yield from self.key()
            return self.reader.ended or (key not in self.given and self.parser.tools.declares(self.name, key))
        yield from self.reader.layout()
        if tag == "\n</function>":
            return (yield from self._wrapper_ends())
        if (yield from self.reader.accept(self.opening, drop_partial=True)):
            key, _ = yield from self.key()
            return self.reader.ended or self._may_come(key)
        return (yield from self._call_ends())

    def _call_ends(self) -> Reading[bool]:
        if (yield from self.reader.accept("</function>", drop_partial=True)):
            yield from self.reader.layout()
            return not self._wrapped or (yield from self._wrapper_ends(again=True))
        return (yield from self._wrapper_ends())

    def _wrapper_ends(self, *, again: bool = False) -> Reading[bool]:
        """Return whether </tool_call> or the end comes next. again: the next call counts too"""
        others = ("<tool_call>", "<function=") if again else ()
        return bool((yield from self.reader.accept("</tool_call>", *others, drop_partial=True))) or self.reader.ended


class GlmParameters(Parameters):
    """<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>, with or without line breaks."""

    opening, closing = "<arg_key>", "</arg_value>"
    call_tags = forgotten = ("</tool_call>",)

    def key(self) -> Reading[tuple[str, bool | None]]:
        """Read a key, see Parameters. The model may write tags twice and leave out <arg_value>."""
        while (yield from self.reader.accept(self.opening)):
            pass
        key, _ = yield from self.reader.until(*_NOT_IN_KEYS, limit=_MAX_KEY, take=False)
        end = yield from self.reader.accept("</arg_key>", "<arg_value>", drop_partial=True)
        if end == "</arg_key>":
            while end != "<arg_value>" and (yield from self.reader.ahead(self._tag())):
                end = yield from self._tag()
        return (key.strip() if end else ""), None

    def _tag(self) -> Reading[str]:
        """Take one more tag between a name and its value and return it; "" if there is none.

        At the end of the text a part of <arg_value> counts as all of it.
        """
        yield from self.reader.layout()
        found = yield from self.reader.accept("</arg_key>", "<arg_value>", drop_partial=True)
        return found or ("<arg_value>" if self.reader.ended else "")

    def ends(self, tag: str) -> Reading[bool]:
        yield from self.reader.accept(tag)
        yield from self.reader.layout()
        if tag == "</tool_call>":
            return self.reader.ended
        if (yield from self.reader.accept(self.opening, drop_partial=True)):
            key, _ = yield from self.key()
            return self.reader.ended or self._may_come(key)
        return (yield from self._call_ends())

    def _call_ends(self) -> Reading[bool]:
        return bool((yield from self.reader.accept("</tool_call>", drop_partial=True))) or self.reader.ended


_DSML = "｜DSML｜"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class DsmlParameters(Parameters):
    """<｜DSML｜parameter name="x" string="true">1</｜DSML｜parameter></｜DSML｜invoke>"""

    opening, closing = f"<{_DSML}parameter", f"</{_DSML}parameter>"
    call_tags = (f"</{_DSML}invoke>",)

    def key(self) -> Reading[tuple[str, bool | None]]:
        attributes = yield from read_attributes(self.parser)
        return attributes.get("name", ""), {"true": True, "false": False}.get(attributes.get("string", ""))

    def ends(self, tag: str) -> Reading[bool]:
        yield from self.reader.accept(tag)
        yield from self.reader.layout()
        if (yield from self.reader.accept(self.opening, drop_partial=True)):
            key, _ = yield from self.key()
            return self.reader.ended or self._may_come(key)
        return (yield from self._call_ends())

    def _call_ends(self) -> Reading[bool]:
        if (yield from self.reader.accept(f"</{_DSML}invoke>", drop_partial=True)):
            yield from self.reader.layout()
            ends = (f"<{_DSML}invoke", f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>")
            return bool((yield from self.reader.accept(*ends, drop_partial=True))) or self.reader.ended
        return self.reader.ended


def read_attributes(parser: ToolParser) -> Reading[dict[str, str]]:
    """Return the attributes of a tag, up to its end."""
    text, end = yield from parser.reader.until(">", "<")
    return dict(_ATTRIBUTE.findall(text)) if end == ">" else {}


class ToolCallParser(ToolParser):
    """Calls between <tool_call> and </tool_call>. All three forms are read, whichever family writes them:

    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>

    named_only: a call may be only the name of a tool
    """

    BEGIN, END = "<tool_call>", "</tool_call>"
    FUNCTION = "<function="
    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)
    bare: ClassVar[tuple[str, ...]] = ()  # texts that begin a call without <tool_call>
    named_only: ClassVar[bool] = False

    def _calls(self) -> Reading[None]:
        is_text = True  # an end tag that comes next belongs to the text
        while marker := (yield from self.content_until(self.BEGIN, self.END, *self.bare)):
            started = False
            if marker != self.END:
                started = yield from (self._wrapped() if marker == self.BEGIN else self._function(wrapped=False))
            if not started and (marker != self.END or is_text):
                self.give_up()
            is_text = is_text if marker == self.END else not started
            self.reader.unmark()

    def _wrapped(self) -> Reading[bool]:
        yield from self.reader.space()
        first = yield from self.reader.peek()
        if first == "[":
            yield from self.reader.accept(first)
            started = yield from self.json_call_list()
        elif first == "{":
            started = yield from self.json_calls(self.END)
        elif first == "<":
            found = yield from self.reader.accept(self.FUNCTION, drop_partial=True)
            return bool(found) and (yield from self._function(wrapped=True))
        else:
            started = yield from self._keyed()
        if started:
            yield from self._end(self.END)
        return started

    def heads(self) -> Iterable[str]:
        call = f"{self.FUNCTION}NAME></function>{self.END}", f"{self.FUNCTION}NAME><parameter="
        keyed = f"{self.BEGIN}NAME<arg_key>", f"{self.BEGIN}NAME{self.END}"
        return *self.json_heads(self.BEGIN), *call, *(self.BEGIN + each for each in call), *keyed

    def _end(self, *tags: str) -> Reading[None]:
        """Take the tags that end a call."""
        for tag in tags:
            yield from self.reader.space()
            yield from self.reader.accept(tag, drop_partial=True)

    def _function(self, *, wrapped: bool) -> Reading[bool]:
        name, end = yield from self.reader.until(">")
        name = name.strip().strip("\"'")
        if not end or not self.offered(name) or not (yield from QwenParameters(self, name, wrapped=wrapped).read()):
            return False
        yield from self._end("</function>", self.END)
        return True

    def _keyed(self) -> Reading[bool]:
        """Read a call that begins with the tool's name. The tags around the first key may be misplaced."""
        ends = ("<arg_key>", self.END, "{", "</arg_key>", "</arg_value>")
        name, end = yield from self.reader.until(*ends, take=False)
        name = name.strip()
        if end == "</arg_key>":  # name and key, without <arg_key> between
            name, key = self._split(name)
            self.reader.put_back("<arg_key>" + key if key else "")
        elif end == "</arg_value>":
            yield from self.reader.accept(end)
        if not end or (end == self.END and not self.named_only) or not self.offered(name):
            return False
        return (yield from GlmParameters(self, name).read())

    def _split(self, text: str) -> tuple[str, str]:
        """Return the names of a tool and of its parameter, which are written in one."""
        for name in self.tools.names:
            key = text.removeprefix(name).strip()
            if text.startswith(name) and self.tools.declares(name, key):
                return name, key
        return "", ""


class Qwen3CoderParser(ToolCallParser):
    """<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"""

    bare = (ToolCallParser.FUNCTION,)


class GlmParser(ToolCallParser):
    """<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>, with or without line breaks."""

    markers = (*ToolCallParser.markers, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    named_only = True


class DsmlParser(ToolParser):
    """DeepSeek V3.2: <｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">..."""

    BEGIN = (f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>")
    markers: ClassVar[tuple[str, ...]] = (_DSML,)

    def _calls(self) -> Reading[None]:
        ends = [tag.replace("<", "</") for tag in self.BEGIN]
        yield from self.sections(self.BEGIN, f"<{_DSML}invoke", self._invoke, ends)

    def heads(self) -> Iterable[str]:
        calls = (f'<{_DSML}invokename="NAME">{after}' for after in (f"</{_DSML}invoke>", f"<{_DSML}parameter"))
        return [begin + call for call in calls for begin in ("", *self.BEGIN)]

    def _invoke(self) -> Reading[bool]:
        name = (yield from read_attributes(self)).get("name", "")
        if not self.offered(name) or not (yield from DsmlParameters(self, name).read()):
            return False
        yield from self.reader.space()
        yield from self.reader.accept(f"</{_DSML}invoke>", drop_partial=True)
        return True


FORMATS = (
    ToolFormat(
        "qwen3_coder",
        Qwen3CoderParser,
        CallFormat(
            TaggedCall(
                "<tool_call>\n<function=NAME>\n",
                "<parameter=KEY>\n",
                "\n</parameter>\n",
                "</function>\n</tool_call>",
                ends=("\n<parameter=", "\n</function>"),
                closed_by=(
                    r"</parameter>[ \t\r\n]*<(parameter=|/function>|/tool_call>)"
                    r"|\n<parameter=|\n</function>[ \t\r\n]*</tool_call>"
                ),
            ),
            trigger="<tool_call>",
        ),
        signs=("<function=",),
        aliases=("qwen3_xml",),
    ),
    ToolFormat(
        "glm45",
        GlmParser,
        CallFormat(
            TaggedCall(
                "<tool_call>NAME\n",
                "<arg_key>KEY</arg_key>\n<arg_value>",
                "</arg_value>\n",
                "</tool_call>",
                closed_by=r"</arg_value>[ \t\r\n]*<(arg_key>|/tool_call>)",
            ),
            trigger="<tool_call>",
        ),
        signs=("<arg_key>",),
        aliases=("glm", "glm47"),
    ),
    ToolFormat(
        "deepseek_v32",
        DsmlParser,
        CallFormat(
            TaggedCall(
                '<｜DSML｜invoke name="NAME">\n',
                '<｜DSML｜parameter name="KEY" string="TEXT">',
                "</｜DSML｜parameter>\n",
                "</｜DSML｜invoke>\n",
                closed_by=r"</｜DSML｜parameter>[ \t\r\n]*<(｜DSML｜parameter|/｜DSML｜invoke>)",
            ),
            *("<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>", "<｜DSML｜function_calls>"),
        ),
        signs=("｜DSML｜",),
        aliases=("deepseekv32",),
    ),
)
