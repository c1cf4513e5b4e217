"""Reasoning between two tags before the answer: DeepSeek R1, Qwen3, GLM, Kimi K2, Mistral, Granite and similar
models.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, merged
from jaxserve.text.reader import Reading, TextReader


@dataclass(frozen=True, slots=True)
class CallOpening:
    """How a tool call begins that ends the thinking without its closing tag.

    `marker`, white space, the name of a tool of the request if `named`, white space, and one of `first`; or without a
    name one of `unnamed`. The marker alone is not enough: a model that thinks about its format writes it too.
    """

    marker: str
    first: tuple[str, ...]
    named: bool = False
    unnamed: tuple[str, ...] = ()

    def read(self, reader: TextReader, tools: Collection[str]) -> Reading[str]:
        """Take the opening; the end of it, or "" if what comes next is none. What was taken is remembered."""
        reader.mark()
        yield from reader.accept(self.marker)
        yield from reader.space()
        if self.named:
            found = yield from reader.accept(*tools, *self.unnamed)
            if not found or found in self.unnamed:
                return found
            yield from reader.space()
        return (yield from reader.accept(*self.first))


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """A family of models that think between tags.

    always: the model thinks though neither the prompt nor its output opens the tag
    calls: tool calls that end the thinking without its closing tag
    """

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False
    calls: tuple[CallOpening, ...] = ()

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Return the texts that the parser looks for. tools: the request offers some."""
        return (self.start, self.end, *((call.marker for call in self.calls) if tools else ()))

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Does the output begin inside the thinking?

        prompt: the rendered prompt; only its end counts, since users may write tags too
        continued: the assistant's own text that the output continues, if any
        """
        if continued:
            return continued.rfind(self.start) > continued.rfind(self.end)
        ending = prompt.rstrip()
        return ending.endswith(self.start) or (self.always and not ending.endswith(self.end))


class ThinkParser:
    """Splits an output into reasoning and content. White space around the tags is layout and is dropped.

    keep: leave the tags and all white space in the reasoning, for callers that put both together again
    tools: names of the request's tools; only a request that offers some can have its thinking ended by a call
    thinking: whether the text read so far ends within the thinking; None: its first characters may still open it
    """

    def __init__(self, tags: ThinkTags, *, inside: bool, keep: bool = False, tools: Collection[str] = ()) -> None:
        self._tags = tags
        self._keep = keep
        self._inside = inside
        self._tools = tools
        self.thinking: bool | None = True if inside else None
        self.reader = TextReader()
        self._events: list[Event] = []
        self._space: list[str] = []  # white space that is dropped if the reasoning ends here
        self._begun = False
        self._run = self._parts()

    def feed(self, delta: str) -> list[Event]:
        if self.thinking is False:
            return [ContentDelta(delta)] if delta else []
        self.reader.push(delta)
        return self._advance()

    def finish(self) -> list[Event]:
        self.reader.closed = True
        return self._advance()

    def _advance(self) -> list[Event]:
        if self.thinking is not False:
            try:
                next(self._run)
            except StopIteration:
                self.thinking = False
        if self.thinking is False and (text := self.reader.take_rest()):
            self._events.append(ContentDelta(text))
        events, self._events = self._events, []
        return merged(events)

    def _parts(self) -> Reading[None]:
        space = yield from self.reader.space()
        opened = yield from self.reader.accept(self._tags.start)
        if not opened and not self._inside:
            if space:
                self._events.append(ContentDelta(space))
            return
        self.thinking = True
        if self._keep:
            self._events.append(ReasoningDelta(space + opened))
        calls = {call.marker: call for call in self._tags.calls} if self._tools else {}
        while True:
            marker = yield from self.reader.copy_until((self._tags.end, *calls), self._reasoning, take=False)
            if marker not in calls:
                break
            found = yield from calls[marker].read(self.reader, self._tools)
            text = self.reader.unmark()
            if found:
                self._events.append(ContentDelta(text))
                return
            self._reasoning(text)
        if marker:
            yield from self.reader.accept(marker)
            space = yield from self.reader.space()
            if self._keep:
                self._events.append(ReasoningDelta(marker + space))

    def _reasoning(self, text: str) -> None:
        if self._keep:
            self._events.append(ReasoningDelta(text))
            return
        text = text if self._begun else text.lstrip()
        stripped = text.rstrip()
        if stripped:
            self._events.append(ReasoningDelta("".join(self._space) + stripped))
            self._space, self._begun = [], True
        self._space.append(text[len(stripped) :])


class LaterThoughts:
    """Takes tags out of the text after the first thinking: a second block is reasoning, a lone end tag is dropped.

    Tags that the text mentions stay: in code, after a quotation mark, and an end tag after a start tag that stayed. A
    start tag within a line, behind a space, opens a block only if the model has thought before.

    thinking: the text read so far ends within a block
    reasoned: the output has had reasoning
    """

    def __init__(self, tags: ThinkTags) -> None:
        self._tags = tags
        self.thinking = self.reasoned = False
        self._mentions = 0  # start tags that stayed, less the end tags that stayed
        self._events: list[Event] = []
        self._begin()

    def _begin(self) -> None:
        self._reader = TextReader()
        self._run = self._parts()
        self._seeks_tag = True  # `_parts` waits for the next tag
        self._code = _CodeMarks()
        self._last = ""  # the last character that went out since the beginning, or a call
        self._space = ""  # of a block, dropped if the block ends here
        self._in_block = False  # the block has had text

    def feed(self, text: str) -> list[Event]:
        tags = self._tags
        if self._seeks_tag and self._reader.is_empty and tags.start[0] not in text and tags.end[0] not in text:
            self._content(text)  # the common case
        else:
            self._reader.push(text)
            next(self._run, None)
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """Return what was held back, at the end of the output or where a call begins, which ends a block too."""
        self._reader.closed = True
        next(self._run, None)
        events, self._events = self._events, []
        self.thinking = False
        self._begin()
        return events

    def _parts(self) -> Reading[None]:
        start, end = self._tags.start, self._tags.end
        while marker := (yield from self._reader.copy_until((start, end), self._content)):
            self._seeks_tag = False
            is_mention = self._code.inside or self._last in tuple("\"'“‘«")
            if marker == start:
                is_mention = is_mention or not (yield from self._opens())
            elif self._mentions:
                is_mention = True
            if is_mention:
                self._mentions = max(0, self._mentions + (1 if marker == start else -1))
                self._content(marker)
                self._seeks_tag = True
                continue
            if marker == start:
                self.thinking, self._in_block = True, False
                marker = yield from self._reader.copy_until((end,), self._thought)
                self.thinking, self._space = False, ""
            space = yield from self._reader.space()
            if self._last and not self._last.isspace():
                self._content(space)
            self._seeks_tag = True

    def _opens(self) -> Reading[bool]:
        """Return whether the start tag that was read opens a block."""
        if self._code.is_line_blank or not self._last.isspace():
            return True
        following = yield from self._reader.peek()
        return self.reasoned and following not in tuple(" \t,.;:!?)") and following != ""

    def _content(self, text: str) -> None:
        if text:
            self._code.add(text)
            self._last = text[-1]
            self._events.append(ContentDelta(text))

    def _thought(self, text: str) -> None:
        text = self._space + text if self._in_block else text.lstrip()
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._events.append(ReasoningDelta("\n" * (self.reasoned and not self._in_block) + stripped))
            self._in_block = self.reasoned = True


class _CodeMarks:
    """Whether the text so far ends within Markdown's code.

    is_line_blank: the last line has nothing but white space
    """

    def __init__(self) -> None:
        self._fenced = False
        self._ticks = 0  # in the last line
        self._head = ""  # the first three characters of the last line, without white space before

    @property
    def inside(self) -> bool:
        return self._fenced or self._ticks % 2 == 1 or self._head == "```"

    @property
    def is_line_blank(self) -> bool:
        return not self._head

    def add(self, text: str) -> None:
        if len(self._head) == 3 and "`" not in text and "\n" not in text:
            return
        first, *lines = text.split("\n")
        self._add_to_line(first)
        for line in lines:
            self._fenced ^= self._head in ("```", "~~~")
            self._ticks, self._head = 0, ""
            self._add_to_line(line)

    def _add_to_line(self, text: str) -> None:
        self._ticks += text.count("`")
        if len(self._head) < 3:
            self._head = (self._head + text).lstrip()[:3]
