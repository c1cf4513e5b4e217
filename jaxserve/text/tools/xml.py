"""Calls whose parameters are plain text between tags: Qwen3-Coder, Seed-OSS, MiMo, GLM 4.5 and later, Hy3, MiniMax M2,
DeepSeek V3.2 and later.

The arguments are made into JSON while they stream. A parameter that the tool's schema declares a string is sent as it
comes, any other when it is complete.

A text may contain the tags of its own format. So a tag ends a value only if the structure of a call follows: the next
parameter, whose name must be one that the tool may have and that was not given yet, or the end of the call, or the end
of the output. A text that contains all of that cannot be told from the end of a value, and the first end counts.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading, json_rest
from jaxserve.text.tools.base import ToolParser, as_json, is_of, is_value
from jaxserve.text.tools.format import CallFormat, CallOpening, TaggedCall, ToolFormat

_MAX_KEY = 256
MAX_STRAY = 16  # signs behind a call that are dropped
_STRAY = ("]", ")", "}", '"', "'", "`", ",", ";", "|", "```json")
_STRAY_TAGS = ("</function>", "</parameter>", "</arg_value>")
_BLANKS = (" ", "\n", "\t", "\r")
_NOT_IN_KEYS = ("<", "\n")


class Parameters(ABC):
    """Reads the parameters of one call of the tool `name`.

    opening: tag that begins a parameter
    closing: tag that ends a parameter
    call_tags: tags that end the call
    forgotten: tags that end a parameter if the model leaves out `closing`
    on_own_lines: a text has a line break at each end that does not belong to it
    """

    opening: str
    closing: str
    call_tags: tuple[str, ...]
    forgotten: tuple[str, ...] = ()
    on_own_lines: bool = False

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
        yield from self.parser.skip_braces()
        ends = (yield from self.reader.ahead(self.reader.accept(*self.call_tags))) or self.reader.ended
        if not ends or (whole and json_rest(text) != ""):
            return False
        self.parser.start_call(self.name)
        self.parser.arguments(self._unwrapped(text))
        self.parser.end_call(whole=whole)
        return True

    def _unwrapped(self, text: str) -> str:
        """Return the arguments if the text is the whole call in JSON, with its name; else the text."""
        with contextlib.suppress(ValueError, RecursionError):
            call = json.loads(text)
            for key in ("arguments", "parameters"):
                is_call = call.keys() == {"name", key} and call["name"] == self.name and isinstance(call[key], dict)
                if is_call and not self.parser.tools.declares(self.name, key):
                    return json.dumps(call[key], ensure_ascii=False)
        return text

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

    def __init__(self, parser: ToolCallParser, name: str, *, wrapped: bool) -> None:
        super().__init__(parser, name)
        self.call_tags, self.on_own_lines = ("</function>", parser.END), parser.on_own_lines
        self.forgotten = ("\n<parameter=", "\n</function>", *self.call_tags)
        self._begin, self._end, self._behind, self._wrapped = parser.BEGIN, parser.END, parser.behind, wrapped

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
        if tag in self.call_tags:
            yield from self.reader.accept(self._end)
            return (yield from self._another_call())
        if (yield from self.reader.accept(self.opening, drop_partial=True)):
            key, _ = yield from self.key()
            return self.reader.ended or self._may_come(key)
        return (yield from self._call_ends())

    def _call_ends(self) -> Reading[bool]:
        if (yield from self.reader.accept("</function>", drop_partial=True)):
            return not self._wrapped or bool((yield from self._behind()))
        return (yield from self._wrapper_ends())

    def _another_call(self) -> Reading[bool]:
        """Return whether a call of an offered tool or the end comes next, after a value without its own tag."""
        yield from self.reader.layout()
        yield from self.reader.accept(self._begin, drop_partial=True)
        yield from self.reader.layout()
        if not (yield from self.reader.accept("<function=", drop_partial=True)):
            return self.reader.ended
        name, end = yield from self.reader.until(">", *_NOT_IN_KEYS, limit=_MAX_KEY)
        return name.strip().strip("\"'") in self.parser.tools if end == ">" else self.reader.ended

    def _wrapper_ends(self) -> Reading[bool]:
        """Return whether </tool_call> or the end comes next."""
        return bool((yield from self.reader.accept(self._end, drop_partial=True))) or self.reader.ended


class GlmParameters(Parameters):
    """<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>, with or without line breaks.

    suffix: of each tag's name, which Hy3 has
    behind: looks for the end of the call behind a value, see ToolCallParser.behind; None: only </tool_call> is one
    """

    def __init__(
        self, parser: ToolParser, name: str, suffix: str = "", *, behind: Callable[..., Reading[str]] | None = None
    ) -> None:
        super().__init__(parser, name)
        self._behind = behind
        self.opening, self._key_end = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
        self._value_begin, self.closing = f"<arg_value{suffix}>", f"</arg_value{suffix}>"
        self._begin, self._end = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
        self._section_end = f"</tool_calls{suffix}>"
        self._after_name = (self.opening, f"<tool_sep{suffix}>", self._end)
        self.call_tags = self.forgotten = (self._end,)

    def key(self) -> Reading[tuple[str, bool | None]]:
        """Read a key, see Parameters. The model may write tags or the whole key twice, and leave out <arg_value>.

        A value without <arg_value> may also lack its end tag: then the next key of the schema ends it.
        """
        key, has_begin = yield from self._key()
        while not has_begin and (yield from self.reader.ahead(self._another_key())):
            yield from self.reader.layout()
            yield from self.reader.accept(self.opening)
            key, has_begin = yield from self._key()
        self.forgotten = (self._end,) if has_begin else (self._end, self.opening)
        if not has_begin:
            yield from self.reader.layout()
        return key, None

    def _key(self) -> Reading[tuple[str, bool]]:
        """Read a key after its opening tag. Returns it, and whether <arg_value> followed."""
        while (yield from self.reader.accept(self.opening)):
            pass
        key, _ = yield from self.reader.until(*_NOT_IN_KEYS, limit=_MAX_KEY, take=False)
        end = yield from self.reader.accept(self._key_end, self._value_begin, drop_partial=True)
        if not end and (yield from self.reader.ahead(self._wrong_end())):
            yield from self._wrong_end()
            return key.strip(), True
        if end == self._key_end:
            while end != self._value_begin and (yield from self.reader.ahead(self._tag())):
                end = yield from self._tag()
        return (key.strip() if end else ""), end == self._value_begin

    def _wrong_end(self) -> Reading[bool]:
        """Take another tag in place of </arg_key>. Return whether <arg_value> follows it."""
        found = yield from self.reader.accept(self.opening, self.closing)
        yield from self.reader.layout()
        return bool(found and (yield from self.reader.accept(self._value_begin)))

    def _another_key(self) -> Reading[bool]:
        """Return whether another key of the tool comes next, in place of a value."""
        yield from self.reader.layout()
        if not (yield from self.reader.accept(self.opening)):
            return False
        key, _ = yield from self._key()
        return self._is_open(key)

    def _is_open(self, key: str) -> bool:
        return key not in self.given and self.parser.tools.declares(self.name, key)

    def _tag(self) -> Reading[str]:
        """Take one more tag between a name and its value and return it; "" if there is none.

        At the end of the text a part of <arg_value> counts as all of it.
        """
        yield from self.reader.layout()
        found = yield from self.reader.accept(self._key_end, self._value_begin, drop_partial=True)
        return found or (self._value_begin if self.reader.ended else "")

    def ends(self, tag: str) -> Reading[bool]:
        yield from self.reader.accept(tag)
        yield from self.reader.layout()
        if tag == self._end:
            return self.reader.ended or (yield from self._another_call())
        if tag == self.opening:
            key, _ = yield from self._key()
            return self._is_open(key)
        if (yield from self.reader.accept(self.opening, drop_partial=True)):
            key, _ = yield from self._key()
            return self.reader.ended or self._may_come(key)
        return (yield from self._call_ends())

    def _call_ends(self) -> Reading[bool]:
        if self._behind is not None:
            return (yield from self._behind(tags=False)) not in ("", self._begin)
        return bool((yield from self.reader.accept(self._end, drop_partial=True))) or self.reader.ended

    def _another_call(self) -> Reading[bool]:
        """Return whether a call of an offered tool or the end comes next, after a value without its own tag."""
        if (yield from self.reader.accept(self._section_end, drop_partial=True)):
            yield from self.reader.layout()
            return self.reader.ended
        begun = yield from self.reader.accept(self._begin, drop_partial=True)
        if not begun or self.reader.ended:
            return self.reader.ended
        name, end = yield from self.reader.until(*self._after_name, limit=_MAX_KEY, take=False)
        name, tools = name.strip(), self.parser.tools
        return name in tools if end else self.reader.ended and any(each.startswith(name) for each in tools.names)


_DSML = "｜DSML｜"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class InvokeParameters(Parameters):
    """<parameter name="x">1</parameter></invoke>

    prefix: of the names of these tags. sections: names of the tags around calls
    """

    def __init__(self, parser: ToolParser, name: str, prefix: str, sections: tuple[str, ...]) -> None:
        super().__init__(parser, name)
        self.opening, self.closing = f"<{prefix}parameter", f"</{prefix}parameter>"
        self._end = f"</{prefix}invoke>"
        self.call_tags = self.forgotten = (self._end,)
        self._begin = f"<{prefix}invoke"
        self._behind = (self._begin, *(f"</{section}>" for section in sections))

    def key(self) -> Reading[tuple[str, bool | None]]:
        """Read a key, see Parameters. DeepSeek says in an attribute whether the value is a text."""
        attributes = yield from read_attributes(self.parser)
        return attributes.get("name", ""), {"true": True, "false": False}.get(attributes.get("string", ""))

    def ends(self, tag: str) -> Reading[bool]:
        yield from self.reader.accept(tag)
        yield from self.reader.layout()
        if tag == self._end:
            return (yield from self._another_call())
        if (yield from self.reader.accept(self.opening, drop_partial=True)):
            key, _ = yield from self.key()
            return self.reader.ended or self._may_come(key)
        return (yield from self._call_ends())

    def _another_call(self) -> Reading[bool]:
        """Return whether a call of an offered tool or the model's end comes next, after a value without its own tag."""
        if (yield from self.reader.accept(*self._behind)) == self._begin:
            name = (yield from read_attributes(self.parser)).get("name")
            return name in self.parser.tools if name is not None else self.reader.ended
        yield from self.reader.layout()
        return self.reader.ended and not self.parser.was_cut

    def _call_ends(self) -> Reading[bool]:
        if (yield from self.reader.accept(self._end, drop_partial=True)):
            yield from self.reader.layout()
            return bool((yield from self.reader.accept(*self._behind, drop_partial=True))) or self.reader.ended
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
    on_own_lines: a value in the second form has a line break at each end that does not belong to it
    """

    BEGIN: ClassVar[str] = "<tool_call>"
    END: ClassVar[str] = "</tool_call>"
    FUNCTION: ClassVar[str] = "<function="
    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)
    call_ends: ClassVar[tuple[str, ...]] = (END,)
    bare: ClassVar[tuple[str, ...]] = ()  # texts that begin a call without <tool_call>
    named_only: ClassVar[bool] = False
    on_own_lines: ClassVar[bool] = True

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
        """Read the calls after <tool_call>, which may be there twice. Each may have its own form."""
        yield from self.reader.space()
        while (yield from self.reader.accept(self.BEGIN)):
            yield from self.reader.space()
        while (yield from self.reader.accept("```json", "`", "(")):
            yield from self.reader.space()
        started = whole = yield from self._any_form()
        while whole and (found := (yield from self.reader.ahead(self.behind(in_text=False)))):
            yield from self._stray()
            if found in (self.END, self.BEGIN):
                yield from self.reader.accept(self.END, drop_partial=True)
                break
            self.reader.mark()
            whole = yield from self._any_form()
            if not whole:
                self.give_up()
        return started

    def _any_form(self) -> Reading[bool]:
        """Read one call, or a list of calls. Return whether there was one."""
        first = yield from self.reader.peek()
        if first == "[":
            while (yield from self.reader.accept("[")):
                yield from self.reader.space()
            return (yield from self.json_call_list())
        if first == "{":
            if (yield from self.reader.accept("{{")):
                self.reader.put_back("{")
            return (yield from self.json_call())
        if first == "<":
            found = yield from self.reader.accept(self.FUNCTION, drop_partial=True)
            return bool(found) and (yield from self._function(wrapped=True))
        return (yield from self._keyed())

    def behind(self, *, in_text: bool = True, tags: bool = True) -> Reading[str]:
        """Look behind a call for the end of the calls, or another call. Signs that do not belong there may come before.

        Returns the tag that comes next, "{" or "[" for a call in JSON, the name of a tool for one with keys, and "" for
        anything else.

        in_text: the text may belong to a value, so that an object counts only with the name of a tool
        tags: end tags of calls are such signs too; not behind GLM's values, which may end in them
        """
        yield from self._stray(_STRAY + _STRAY_TAGS if tags else _STRAY)
        tag = yield from self.reader.accept(self.END, self.BEGIN, self.FUNCTION, drop_partial=True)
        if tag or self.reader.ended:
            return tag or self.END
        if sign := (yield from self.reader.accept("{", "[")):
            return sign if not in_text or (yield from self._names_a_tool()) else ""
        name, _ = yield from self.reader.until("<", limit=_MAX_KEY, take=False)
        is_call = name.strip() in self.tools and (yield from self.reader.accept("<arg_key>", drop_partial=True))
        return name.strip() if is_call else ""

    def _names_a_tool(self) -> Reading[bool]:
        """Return whether a call in JSON goes on with the name of a tool, after its first bracket."""
        while (yield from self.reader.accept("{", "[", *_BLANKS)):
            pass
        key = yield from self.reader.json_string()
        yield from self.reader.layout()
        if key != "name" or not (yield from self.reader.accept(":")):
            return self.reader.ended
        yield from self.reader.layout()
        name = yield from self.reader.json_string()
        return self.reader.ended if name is None else name in self.tools

    def _stray(self, signs: tuple[str, ...] = _STRAY + _STRAY_TAGS) -> Reading[None]:
        """Take blanks, brackets and quotes that the model wrote behind a call, and end tags of other forms of calls."""
        for _ in range(MAX_STRAY):
            yield from self.reader.layout()
            if not (yield from self.reader.accept(*signs)):
                break

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
        if not end or not self.offered(name):
            return False
        if not (yield from QwenParameters(self, name, wrapped=wrapped).read()):
            return False
        yield from self._end("</function>", *(() if wrapped else (self.END,)))
        return True

    def _keyed(self) -> Reading[bool]:
        """Read a call that begins with the tool's name. The tags around the first key may be misplaced."""
        ends = ("<arg_key>", self.END, "{", "</arg_key>", "</arg_value>", "<arg_value>")
        name, end = yield from self.reader.until(*ends, take=False)
        name = name.strip()
        if end == "</arg_key>" and name not in self.tools:  # name and key, without <arg_key> between
            name, key = self._split(name)
            self.reader.put_back("<arg_key>" + key if key else "")
        else:
            while (yield from self.reader.accept("</arg_key>", "</arg_value>", "<arg_value>")):
                yield from self.reader.layout()
        if not end or (end == self.END and not self.named_only) or not self.offered(name):
            return False
        return (yield from GlmParameters(self, name, behind=self.behind).read())

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


class SeedParser(Qwen3CoderParser):
    """<seed:tool_call><function=f><parameter=x>1</parameter></function></seed:tool_call>; a value has no own lines."""

    BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"
    markers = (BEGIN, END)
    call_ends = (END,)
    on_own_lines = False


class MimoParser(Qwen3CoderParser):
    """As Qwen3-Coder writes calls, but a value is kept as it is, with its line breaks."""

    on_own_lines = False


class HyParser(ToolParser):
    """<tool_calls><tool_call>f<tool_sep><arg_key>x</arg_key><arg_value>1</arg_value></tool_call></tool_calls>

    suffix: of each tag's name
    """

    suffix: ClassVar[str] = ":opensource"
    names: ClassVar[tuple[str, ...]] = ("tool_calls", "tool_call", "arg_key", "arg_value")
    markers = ("<tool_sep:opensource>", *(f"{end}{name}:opensource>" for name in names for end in ("<", "</")))

    def _calls(self) -> Reading[None]:
        begin, call, end = (f"<{name}{self.suffix}>" for name in ("tool_calls", "tool_call", "/tool_calls"))
        yield from self.sections((begin,), call, self._call, (end,))

    def heads(self) -> Iterable[str]:
        s = self.suffix
        calls = [f"<tool_call{s}>NAME{end}" for end in (f"<tool_sep{s}>", f"<arg_key{s}>", f"</tool_call{s}>")]
        return [begin + call for call in calls for begin in ("", f"<tool_calls{s}>")]

    def _call(self) -> Reading[bool]:
        separator, end = f"<tool_sep{self.suffix}>", f"</tool_call{self.suffix}>"
        name, found = yield from self.reader.until(separator, f"<arg_key{self.suffix}>", end, take=False)
        if not found or not self.offered(name.strip()):
            return False
        yield from self.reader.accept(separator)
        if not (yield from GlmParameters(self, name.strip(), self.suffix).read()):
            return False
        yield from self.reader.space()
        yield from self.reader.accept(end, drop_partial=True)
        return True


class HyPreviewParser(HyParser):
    """As HyParser, without a suffix."""

    suffix = ""
    markers = ("<tool_sep>", *(f"{end}{name}>" for name in HyParser.names for end in ("<", "</")))


class InvokeParser(ToolParser):
    """<invoke name="f"><parameter name="x">1</parameter></invoke>, in a section of calls.

    prefix: of the names of these tags. section_names: names of the tags around calls
    """

    prefix: ClassVar[str]
    section_names: ClassVar[tuple[str, ...]]

    def _calls(self) -> Reading[None]:
        begins, ends = ([f"<{slash}{name}>" for name in self.section_names] for slash in ("", "/"))
        yield from self.sections(begins, f"<{self.prefix}invoke", self._invoke, ends)

    def heads(self) -> Iterable[str]:
        ends = (f"</{self.prefix}invoke>", f"<{self.prefix}parameter")
        calls = [f'<{self.prefix}invokename="NAME">{after}' for after in ends]
        return [begin + call for call in calls for begin in ("", *(f"<{name}>" for name in self.section_names))]

    def _invoke(self) -> Reading[bool]:
        name = (yield from read_attributes(self)).get("name", "")
        parameters = InvokeParameters(self, name, self.prefix, self.section_names)
        if not self.offered(name) or not (yield from parameters.read()):
            return False
        yield from self.reader.space()
        yield from self.reader.accept(f"</{self.prefix}invoke>", drop_partial=True)
        return True


class DsmlParser(InvokeParser):
    """DeepSeek V3.2: <｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">..."""

    prefix = _DSML
    section_names = (f"{_DSML}function_calls", f"{_DSML}tool_calls")
    markers = (_DSML,)


class MiniMaxParser(InvokeParser):
    """<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>"""

    prefix = ""
    section_names = ("minimax:tool_call",)
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")


_QWEN_CLOSED_BY = (
    r"</parameter>[ \t\r\n]*<(parameter=|/function>|/WRAPPER>)"
    r"|\n<parameter=|\n</function>[ \t\r\n]*</WRAPPER>"
    r"|</(function|WRAPPER)>[ \t\r\n]*(</WRAPPER>[ \t\r\n]*)?(<WRAPPER>[ \t\r\n]*)?<function="
)


def _qwen_calls(wrapper: str = "tool_call", line: str = "\n") -> CallFormat:
    """Return how Qwen3-Coder writes calls. line: the text around a value"""
    call = TaggedCall(
        f"<{wrapper}>\n<function=NAME>\n",
        f"<parameter=KEY>{line}",
        f"{line}</parameter>\n",
        f"</function>\n</{wrapper}>",
        ends=("\n<parameter=", "\n</function>"),
        closed_by=_QWEN_CLOSED_BY.replace("WRAPPER", wrapper),
    )
    return CallFormat(call, trigger=f"<{wrapper}>")


def _glm_calls(line: str) -> CallFormat:
    """Return how GLM writes calls. line: the text between tags"""
    call = TaggedCall(
        f"<tool_call>NAME{line}",
        f"<arg_key>KEY</arg_key>{line}<arg_value>",
        f"</arg_value>{line}",
        "</tool_call>",
        closed_by=r"</arg_value>[^<{]*(<(arg_key>|/tool_call>|function=)|\{)|</tool_call>[ \t\r\n]*<tool_call>",
    )
    return CallFormat(call, trigger="<tool_call>")


def _hy(name: str, parser: type[HyParser]) -> ToolFormat:
    """Return the format whose tags end with the parser's suffix."""
    s = parser.suffix
    call = TaggedCall(
        f"<tool_call{s}>NAME<tool_sep{s}>\n",
        f"<arg_key{s}>KEY</arg_key{s}>\n<arg_value{s}>",
        f"</arg_value{s}>\n",
        f"</tool_call{s}>\n",
        closed_by=rf"</arg_value{s}>[ \t\r\n]*<(arg_key{s}>|/tool_call{s}>)|</tool_call{s}>[ \t\r\n]*<tool_call{s}>",
    )
    begin, end = f"<tool_calls{s}>", f"</tool_calls{s}>"
    calls = CallFormat(call, f"{begin}\n", "", end, begin)
    return ToolFormat(
        name, parser, calls, signs=(f"<tool_sep{s}>",), openings=(CallOpening(begin, (f"<tool_call{s}>",)),)
    )


FORMATS = (
    ToolFormat(
        "seed_oss",
        SeedParser,
        _qwen_calls("seed:tool_call", ""),
        signs=("<seed:tool_call>",),
        openings=(CallOpening("<seed:tool_call>", ("<function=",)),),
    ),
    ToolFormat(
        "mimo",
        MimoParser,
        _qwen_calls(line=""),
        signs=("is preserved exactly as-is", "<parameter=' + args_name + '>' }}"),
        openings=(CallOpening("<tool_call>", ("{", "[{", "<function=")),),
    ),
    ToolFormat(
        "qwen3_coder",
        Qwen3CoderParser,
        _qwen_calls(),
        signs=("<function=",),
        aliases=("qwen3_xml", "step3p5", "nemotron_v3"),
        openings=(CallOpening("<tool_call>", ("{", "[{", "<function=")),),
    ),
    _hy("hy_v3", HyParser),
    _hy("hy_v3_preview", HyPreviewParser),
    ToolFormat(
        "glm45",
        GlmParser,
        _glm_calls("\n"),
        signs=("<arg_key>",),
        aliases=("glm", "glm47", "poolside_v1"),
        variants=(("</arg_key><arg_value>", _glm_calls("")),),
        openings=(CallOpening("<tool_call>", ("<arg_key>", "</tool_call>"), named=True),),
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
                closed_by=r"</｜DSML｜parameter>[ \t\r\n]*<(｜DSML｜parameter|/｜DSML｜invoke>)"
                r"|</｜DSML｜invoke>[ \t\r\n]*<｜DSML｜invoke",
            ),
            *("<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>", "<｜DSML｜function_calls>"),
        ),
        signs=("｜DSML｜",),
        aliases=("deepseekv32",),
        openings=tuple(CallOpening(f"<{name}>", (f"<{_DSML}invoke",)) for name in DsmlParser.section_names),
    ),
    ToolFormat(
        "minimax_m2",
        MiniMaxParser,
        CallFormat(
            TaggedCall(
                '<invoke name="NAME">\n',
                '<parameter name="KEY">',
                "</parameter>\n",
                "</invoke>\n",
                closed_by=r"</parameter>[ \t\r\n]*<(parameter|/invoke>)|</invoke>[ \t\r\n]*<invoke",
            ),
            *("<minimax:tool_call>\n", "", "</minimax:tool_call>", "<minimax:tool_call>"),
        ),
        signs=("<minimax:tool_call>",),
        aliases=("minimax",),
        openings=(CallOpening("<minimax:tool_call>", ("<invoke",)),),
    ),
)
