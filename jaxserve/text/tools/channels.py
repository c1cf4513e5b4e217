"""Formats in which an output is one stream of messages, each with a header that says to whom it goes.

    HarmonyParser   gpt-oss
    MuseParser      Muse Glimmer
    Thoughts        divides such an output into reasoning and answer without changing its text

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{"x": 1}<|call|>            or            <|start|>assistant<|channel|>final<|message|>...<|return|>

In harmony, analysis is reasoning, final and commentary without a recipient are content, to=functions.NAME is a call.
Messages to tools that the model has built in (browser, python) belong to its reasoning. gpt-oss also writes to=NAME: a
call if the request offers the tool.

     to=self<|message|>...<|eom|><|start|>assistant to=f<|message|><atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="x">1</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|>          or            <|start|>assistant to=user<|message|>...<|eot|>

Muse Glimmer thinks in messages to itself. Only a message to a tool has calls: those that reasoning or an answer show
are text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, merged
from jaxserve.text.reader import Reading, TextReader
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, Channels, NamedCall, TaggedCall, ToolFormat
from jaxserve.text.tools.xml import InvokeParameters, read_attributes

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_RECIPIENT = re.compile(r"""\bto=["'`]?([^\s"'`]+)""")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER = 512
# the header's words and tokens, as far as they come in this order
_HEADER = re.compile(
    r"\s*(<\|start\|>)?\s*((assistant|user|system|developer|tool)\b)?\s*(to=\S+?(?=\s|<\||$))?"
    r"(\s*<\|channel\|>\s*((analysis|commentary|final)\b)?\s*(to=\S+?(?=\s|<\||$))?)*"
    r"(\s*<\|constrain\|>\s*\w*)?\s*"
)

_HEADER_WORDS = ("assistant", "analysis", "commentary", "final", "to=functions.")


class HarmonyParser(ToolParser):
    """gpt-oss.

    begins: tokens of a header. breaks: those that begin one within a message without an end. ends: tokens that end a
    message
    """

    begins: ClassVar[tuple[str, ...]] = (START, CHANNEL, CONSTRAIN)
    breaks: ClassVar[tuple[str, ...]] = (START, CHANNEL)
    ends: ClassVar[tuple[str, ...]] = ("<|end|>", "<|call|>", "<|return|>")
    markers: ClassVar[tuple[str, ...]] = (*begins, MESSAGE, *ends)
    call_ends = ends

    @classmethod
    def is_thought(cls, header: str) -> bool:
        """Return whether a message with this header is reasoning. The last of several channels counts."""
        return _CHANNEL_NAME.findall(header)[-1:] == ["analysis"]

    def _calls(self) -> Reading[None]:
        yield from self._recipient_first()
        while marker := (yield from self.content_until(*self.markers)):
            if marker in self.ends or marker == MESSAGE:  # the message has no header
                self.reader.unmark()
                continue
            yield from self._headed(marker)

    def _recipient_first(self) -> Reading[None]:
        """Read an output that begins with a recipient: the prompt ends with <|start|>assistant, to=NAME may follow."""
        self.reader.mark()
        yield from self.reader.space()
        if (yield from self.reader.accept("to=")):
            yield from self._headed("to=")
        else:
            self.give_up()

    def _headed(self, begin: str) -> Reading[None]:
        """Read a message whose header begins with `begin`. If it breaks off, the header is not shown."""
        self.thinking = False
        header, end = yield from self.reader.until(MESSAGE, START, *self.ends, limit=_MAX_HEADER, take=False)
        header = begin + header
        is_header = self._marked or CHANNEL in header
        ends_whole = end in self.ends or (self.is_whole and self.reader.ended)
        if end != MESSAGE and not (is_header and ends_whole and self._called(header) in self.tools):
            self._broken(header) if is_header else self.give_up()
            return
        yield from self.reader.accept(MESSAGE)
        self.reader.unmark()
        yield from self._message(header)

    def _broken(self, header: str) -> None:
        """Drop a header that no message follows. Text behind its words belongs to its channel, a part of a word not."""
        self.reader.unmark()
        rest = header[_HEADER.match(header).end() :]  # type: ignore[union-attr]  # it matches the empty text too
        if self.reader.ended and (not self.is_whole or any(word.startswith(rest.strip()) for word in _HEADER_WORDS)):
            return
        if not rest:
            return
        if self.is_thought(header):
            self._break_reasoning()
            self._reasoning(rest)
        else:
            self.content(rest)

    def _is_head(self, text: str) -> bool:
        """As in ToolParser. Any header that is not too long counts, because a header is never shown as text."""
        if self._marked or CHANNEL in text:
            return len(text) <= _MAX_HEADER
        header = text.strip()
        return "to=functions." in header and any(f"to=functions.{name}".startswith(header) for name in self.tools.names)

    def _message(self, header: str) -> Reading[None]:
        recipient, name = self._recipient(header), self._called(header)
        function = name != recipient or name in self.tools
        if function and self.offered(name):
            yield from self._call(name)
        elif function:
            self.content(header + MESSAGE)
            yield from self._text(self.content)
        elif recipient or self.is_thought(header):
            yield from self._thought()
        else:
            yield from self._text(self.content)

    def _thought(self) -> Reading[None]:
        self._break_reasoning()
        self.thinking = True
        yield from self._text(self._reasoning)

    def _text(self, sink: Callable[[str], None]) -> Reading[None]:
        """Read the text of a message up to its end, or to a header that the model wrote without ending it."""
        marks, called = (*self.ends, *self.breaks), self.num_calls > 0
        while marker := (yield from self.reader.copy_until(marks, sink, take=False, drop_partial=called)):
            if marker != CHANNEL or (yield from self.reader.ahead(self._header())):
                return
            sink(self.reader.take_one())

    def _header(self) -> Reading[bool]:
        """Return whether a whole header with a channel comes next."""
        yield from self.reader.accept(CHANNEL)
        header, end = yield from self.reader.until(MESSAGE, CHANNEL, START, *self.ends, limit=_MAX_HEADER)
        return end == MESSAGE and bool(_CHANNEL_NAME.match(CHANNEL + header))

    def _recipient(self, header: str) -> str:
        """Return the recipient of a message; "" if it is the user."""
        found = _RECIPIENT.search(header.replace(CHANNEL, " ").replace(CONSTRAIN, " "))
        return found[1] if found else ""

    def _called(self, header: str) -> str:
        return self._recipient(header).removeprefix("functions.")

    def _call(self, name: str) -> Reading[None]:
        self.start_call(name)
        yield from self.reader.space()
        # a string in them may contain the marks
        if (yield from self.reader.peek()) == "{" and (yield from self.json_arguments()):
            yield from self.reader.until(*self.ends, START, take=False)
            self.end_call()
            return
        end = yield from self.reader.copy_until((*self.ends, START), self.arguments, take=False, drop_partial=True)
        self.end_call(whole=bool(end) or self.is_whole)  # <|call|> ends the output and is not part of its text

    def _break_reasoning(self) -> None:
        if self._reasoned:
            self._events.append(ReasoningDelta("\n"))
        self._reasoned = False

    _reasoned = False

    def _reasoning(self, text: str) -> None:
        self._reasoned = True
        self._events.append(ReasoningDelta(text))


_ATEM = "atem:"
_SECTION, _INVOKE, _INVOKED = f"<{_ATEM}function_calls>", f"<{_ATEM}invoke", f"</{_ATEM}invoke>"


class MuseParser(HarmonyParser):
    """Muse Glimmer. It may write the name of a tool `f` as `f.f`, because the names that it knows have two parts."""

    begins = breaks = (START,)
    ends = ("<|eom|>", "<|eot|>")
    markers = (*begins, MESSAGE, *ends)
    _to_tool = False  # the message that is read is to a tool

    @classmethod
    def is_thought(cls, header: str) -> bool:
        found = _RECIPIENT.search(header)
        return found is not None and found[1] == "self"

    def _calls(self) -> Reading[None]:
        yield from self._recipient_first()
        while marker := (yield from self.content_until(*self.markers, *((_SECTION, _INVOKE) if self._to_tool else ()))):
            if marker in (_SECTION, _INVOKE):
                if marker == _SECTION:
                    yield from self.reader.space()
                    marker = yield from self.reader.accept(_INVOKE, drop_partial=True)
                if not marker or not (yield from self._invoke()):
                    self.give_up()
                    continue
                yield from self.reader.space()
                yield from self.reader.accept(f"</{_SECTION[1:]}", drop_partial=True)
                continue
            self._to_tool = False
            if marker == START:
                yield from self._headed(marker)
            else:
                self.reader.unmark()

    def heads(self) -> Iterable[str]:
        calls = [f'{_INVOKE}name="NAME">{after}' for after in (_INVOKED, f"<{_ATEM}parameter")]
        return [begin + call for call in calls for begin in ("", _SECTION)]

    def _is_head(self, text: str) -> bool:
        """As in HarmonyParser. An output begins with a recipient, whose header is never shown as text either."""
        cut = text.strip()
        is_recipient = cut.startswith("to=") and not any(map(str.isspace, cut))
        return is_recipient or (self._marked and text.startswith(START)) or ToolParser._is_head(self, text)

    def _message(self, header: str) -> Reading[None]:
        recipient = self._recipient(header)
        if self.is_thought(header):
            yield from self._thought()
        elif recipient in ("", "user"):
            yield from self._text(self.content)
        else:
            self._to_tool = True
            if self._tool(recipient) not in self.tools:
                self.content(header + MESSAGE)

    def _invoke(self) -> Reading[bool]:
        name = self._tool((yield from read_attributes(self)).get("name", ""))
        if not self.offered(name) or not (yield from _MuseParameters(self, name).read()):
            return False
        yield from self.reader.space()
        yield from self.reader.accept(_INVOKED, drop_partial=True)
        return True

    def _tool(self, name: str) -> str:
        """Return the name of the tool that is meant."""
        last = name.rpartition(".")[2]
        return last if name not in self.tools and last in self.tools else name


class _MuseParameters(InvokeParameters):
    """Parameters of a call behind which the message may end."""

    def __init__(self, parser: MuseParser, name: str) -> None:
        super().__init__(parser, name, _ATEM, (_SECTION[1:-1],))
        self._behind = (*self._behind, *parser.ends, START)


CHANNELS: Mapping[str, type[HarmonyParser]] = MappingProxyType({"harmony": HarmonyParser, "muse_glimmer": MuseParser})


class Thoughts:
    """Divides an output into reasoning and answer without changing its text. Headers count as reasoning.

    `feed` and `finish` work as in a parser, but all text comes back, as ReasoningDelta or ContentDelta.
    """

    def __init__(self, parser: type[HarmonyParser]) -> None:
        self._parser = parser
        self._reader = TextReader()
        self._events: list[Event] = []
        self._run = self._parts()

    def feed(self, delta: str) -> list[Event]:
        self._reader.push(delta)
        return self._advance()

    def finish(self) -> list[Event]:
        self._reader.closed = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._run, None)
        events, self._events = self._events, []
        return merged(events)

    def _reasoning(self, text: str) -> None:
        self._events.append(ReasoningDelta(text))

    def _answer(self, text: str) -> None:
        self._events.append(ContentDelta(text))

    def _parts(self) -> Reading[None]:
        sink = yield from self._first()
        while marker := (yield from self._reader.copy_until((*self._parser.breaks, *self._parser.ends), sink)):
            self._reasoning(marker)
            sink = self._answer if marker in self._parser.ends else (yield from self._headed(marker))

    def _first(self) -> Reading[Callable[[str], None]]:
        """Read a recipient with which the output begins. Return what takes the text behind it."""
        self._reader.mark()
        yield from self._reader.space()
        begun = yield from self._reader.accept("to=")
        text = self._reader.unmark()
        if not begun:
            if text:
                self._answer(text)
            return self._answer
        self._reasoning(text)
        return (yield from self._headed(text))

    def _headed(self, begin: str) -> Reading[Callable[[str], None]]:
        """Read the header of a message, of which `begin` was read. Return what takes its text."""
        header = [begin]

        def keep(text: str) -> None:
            header.append(text)
            self._reasoning(text)

        end = yield from self._reader.copy_until((MESSAGE, *self._parser.ends), keep)
        self._reasoning(end)
        is_thought = end == MESSAGE and self._parser.is_thought("".join(header))
        return self._reasoning if is_thought else self._answer


FORMATS = (
    ToolFormat(
        "harmony",
        HarmonyParser,
        CallFormat(
            NamedCall("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"),
            single=True,
            channels=Channels(
                "<|channel|>analysis<|message|>",
                "<|end|>",
                "<|start|>assistant",
                "<|channel|>final<|message|>",
            ),
        ),
        aliases=("openai", "gpt_oss"),
    ),
    ToolFormat(
        "muse_glimmer",
        MuseParser,
        CallFormat(
            TaggedCall(
                f' to=NAME<|message|>{_SECTION}\n{_INVOKE} name="NAME">\n',
                f'<{_ATEM}parameter name="KEY">',
                f"</{_ATEM}parameter>\n",
                f"{_INVOKED}\n</{_SECTION[1:]}",
                closed_by=rf"</{_ATEM}parameter>[ \t\r\n]*<({_ATEM}parameter|/{_ATEM}invoke>)"
                rf"|{_INVOKED}[ \t\r\n]*{_INVOKE}",
            ),
            separator="<|eom|><|start|>assistant",
            channels=Channels(" to=self<|message|>", "<|eom|>", "<|start|>assistant", " to=user<|message|>"),
        ),
        signs=(_SECTION,),
        aliases=("muse",),
    ),
)
