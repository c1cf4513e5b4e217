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

from jaxserve.text.events import ReasoningDelta
from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER = 512


class HarmonyParser(ToolParser):
    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def _calls(self) -> Reading[None]:
        yield from self._recipient_first()
        while marker := (yield from self.content_until(START, CHANNEL, *ENDS)):
            if marker in ENDS:
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
        """Read a message whose header begins with `begin`. A header that breaks off is content."""
        self.thinking = False
        header, end = yield from self.reader.until(MESSAGE, START, *ENDS, limit=_MAX_HEADER, take=False)
        header = begin + header
        is_header = self._marked or CHANNEL in header
        ends_whole = end in ENDS or (self.is_whole and self.reader.ended)
        if end != MESSAGE and not (is_header and ends_whole and self._called(header) in self.tools):
            self.give_up()
            return
        yield from self.reader.accept(MESSAGE)
        self.reader.unmark()
        yield from self._message(header)

    def heads(self) -> Iterable[str]:
        return ("to=functions.NAME",)

    def _begins_call(self, text: str) -> bool:
        """As in ToolParser. Any header that is not too long counts, because a header is never shown as text."""
        if self._marked or CHANNEL in text:
            return len(text) <= _MAX_HEADER
        return "to=functions." in text and super()._begins_call(text)

    def _message(self, header: str) -> Reading[None]:
        channel = _CHANNEL_NAME.search(header)
        recipient, name = self._recipient(header), self._called(header)
        function = name != recipient or name in self.tools
        if function and self.offered(name):
            yield from self._call(name)
        elif function:
            self.content(header + MESSAGE)
            yield from self.reader.copy_until((*ENDS, START), self.content, take=False)
        elif (channel and channel[1] == "analysis") or recipient:
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
