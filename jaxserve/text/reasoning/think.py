"""Reasoning between two tags before the answer: DeepSeek R1, Qwen3, GLM, Kimi K2, Mistral, Granite and their kin."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, merged
from jaxserve.text.reader import Reading, TextReader


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """A family of models that think between tags.

    always: the model thinks though neither the prompt nor its output opens the tag
    ends: texts that end the thinking without its closing tag and belong to what follows (a tool call)
    """

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False
    ends: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.end, *self.ends)

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
    """

    def __init__(self, tags: ThinkTags, *, inside: bool, keep: bool = False) -> None:
        self._tags = tags
        self._keep = keep
        self._inside = inside
        self.reader = TextReader()
        self._events: list[Event] = []
        self._space: list[str] = []  # white space that is dropped if the reasoning ends here
        self._begun = False
        self._run = self._parts()
        self._rest = False

    def feed(self, delta: str) -> list[Event]:
        if self._rest:
            return [ContentDelta(delta)] if delta else []
        self.reader.push(delta)
        return self._advance()

    def finish(self) -> list[Event]:
        self.reader.closed = True
        return self._advance()

    def _advance(self) -> list[Event]:
        if not self._rest:
            try:
                next(self._run)
            except StopIteration:
                self._rest = True
        if self._rest and (text := self.reader.take_rest()):
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
        if self._keep:
            self._events.append(ReasoningDelta(space + opened))
        marker = yield from self.reader.copy_until((self._tags.end, *self._tags.ends), self._reasoning, take=False)
        if marker == self._tags.end:
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
