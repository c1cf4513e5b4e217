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

    `marker`, white space, the name of a tool of the request if `named`, white space, and one of `first`. The marker
    alone is not enough: a model that thinks about its format writes it too.
    """

    marker: str
    first: tuple[str, ...]
    named: bool = False

    def read(self, reader: TextReader, tools: Collection[str]) -> Reading[str]:
        """Take the opening; the end of it, or "" if what comes next is none. What was taken is remembered."""
        reader.mark()
        yield from reader.accept(self.marker)
        yield from reader.space()
        if self.named:
            if not (yield from reader.accept(*tools)):
                return ""
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
