"""gpt-oss's harmony format: one stream of messages on channels, with reasoning, answer and calls.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{"x": 1}<|call|>            or            <|start|>assistant<|channel|>final<|message|>...<|return|>

analysis is reasoning, final and commentary without a recipient are content, to=functions.NAME is a call. Messages to
tools that the model has built in (browser, python) belong to its reasoning. gpt-oss also writes to=NAME: a call if
the request offers the tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, merged
from jaxserve.text.reader import Reading, TextReader
from jaxserve.text.tools.base import ToolParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER = 512
# the header's words and tokens, as far as they come in this order
_HEADER = re.compile(
    r"\s*(<\|start\|>)?\s*((assistant|user|system|developer|tool)\b)?\s*(to=\S+?(?=\s|<\||$))?"
    r"(\s*<\|channel\|>\s*((analysis|commentary|final)\b)?\s*(to=\S+?(?=\s|<\||$))?)*"
    r"(\s*<\|constrain\|>\s*\w*)?\s*"
)


class HarmonyParser(ToolParser):
    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def _calls(self) -> Reading[None]:
        yield from self._recipient_first()
        while marker := (yield from self.content_until(START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)):
            if marker in ENDS or marker == MESSAGE:  # of a message without a header
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
        """Read a message whose header begins with `begin`. Of one that breaks off, only what is no header is shown."""
        self.thinking = False
        header, end = yield from self.reader.until(MESSAGE, START, *ENDS, limit=_MAX_HEADER, take=False)
        header = begin + header
        is_header = self._marked or CHANNEL in header
        ends_whole = end in ENDS or (self.is_whole and self.reader.ended)
        if end != MESSAGE and not (is_header and ends_whole and self._called(header) in self.tools):
            self._broken(header) if is_header else self.give_up()
            return
        yield from self.reader.accept(MESSAGE)
        self.reader.unmark()
        yield from self._message(header)

    def _broken(self, header: str) -> None:
        """Drop a header that no message follows. What stands behind its words is text of its channel."""
        self.reader.unmark()
        rest = header[_HEADER.match(header).end() :]  # type: ignore[union-attr]  # it matches the empty text too
        if not rest or (self.reader.ended and not self.is_whole):
            return
        channels = _CHANNEL_NAME.findall(header)
        if channels and channels[-1] == "analysis":
            self._break_reasoning()
            self._reasoning(rest)
        else:
            self.content(rest)

    def heads(self) -> Iterable[str]:
        return ("to=functions.NAME",)

    def _begins_call(self, text: str) -> bool:
        """As in ToolParser. Any header that is not too long counts, because a header is never shown as text."""
        if self._marked or CHANNEL in text:
            return len(text) <= _MAX_HEADER
        return "to=functions." in text and super()._begins_call(text)

    def _message(self, header: str) -> Reading[None]:
        channels = _CHANNEL_NAME.findall(header)  # a malformed header has several: the last one counts
        recipient, name = self._recipient(header), self._called(header)
        function = name != recipient or name in self.tools
        if function and self.offered(name):
            yield from self._call(name)
        elif function:
            self.content(header + MESSAGE)
            yield from self.reader.copy_until((*ENDS, START), self.content, take=False)
        elif channels[-1:] == ["analysis"] or recipient:
            self._break_reasoning()
            self.thinking = True
            yield from self.reader.copy_until((*ENDS, START), self._reasoning, take=False)
        else:
            yield from self.reader.copy_until((*ENDS, START), self.content, take=False)

    def _recipient(self, header: str) -> str:
        """Return whom a message is to; "" if it is to the user."""
        found = _RECIPIENT.search(header.replace(CHANNEL, " ").replace(CONSTRAIN, " "))
        return found[1] if found else ""

    def _called(self, header: str) -> str:
        return self._recipient(header).removeprefix("functions.")

    def _call(self, name: str) -> Reading[None]:
        self.start_call(name)
        yield from self.reader.space()
        # a string in them may contain the marks
        if (yield from self.reader.peek()) == "{" and (yield from self.json_arguments()):
            yield from self.reader.until(*ENDS, START, take=False)
            self.end_call()
            return
        end = yield from self.reader.copy_until((*ENDS, START), self.arguments, take=False, drop_partial=True)
        self.end_call(whole=bool(end) or self.is_whole)  # <|call|> ends the output and is not part of its text

    def _break_reasoning(self) -> None:
        if self._reasoned:
            self._events.append(ReasoningDelta("\n"))
        self._reasoned = False

    _reasoned = False

    def _reasoning(self, text: str) -> None:
        self._reasoned = True
        self._events.append(ReasoningDelta(text))


class HarmonyThoughts:
    """Divides an output into reasoning and answer without changing its text. Headers count as reasoning.

    feed, finish: as those of a parser, but all text comes back, as ReasoningDelta or ContentDelta
    """

    def __init__(self) -> None:
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
        sink = self._answer
        while marker := (yield from self._reader.copy_until((START, CHANNEL, *ENDS), sink)):
            self._reasoning(marker)
            sink = self._answer
            if marker in ENDS:
                continue
            header: list[str] = []

            def keep(text: str, header: list[str] = header) -> None:
                header.append(text)
                self._reasoning(text)

            end = yield from self._reader.copy_until((MESSAGE, *ENDS), keep)
            self._reasoning(end)
            channels = _CHANNEL_NAME.findall(marker + "".join(header))
            sink = self._reasoning if end == MESSAGE and channels[-1:] == ["analysis"] else self._answer
