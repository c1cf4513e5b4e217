"""The events of a parsed output as it streams: answer text, reasoning text, tool calls.

Joined, the events of a stream are the same however the text was cut into deltas. An unstreamed answer is made from the
same events, so both forms of an answer agree by construction. The events are Structs, because nearly every token makes
one: a frozen dataclass takes 0.7 us, a Struct 0.1 us.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """index counts the calls of an output from 0. custom: the call's input is free text, not JSON arguments."""

    index: int
    id: str
    name: str
    custom: bool = False


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """The next characters of the call's arguments (JSON text as the model wrote it) or of a custom tool's input."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False):
    index: int


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class OutputParser(Protocol):
    """Reads one output's text. Never raises for any text of a model: text that it cannot read is content."""

    @property
    def thinking(self) -> bool:
        """Whether the text read so far ends within reasoning, or may end there."""
        ...

    def feed(self, delta: str) -> list[Event]:
        """Return the events that this text completes."""
        ...

    def finish(self, *, whole: bool = False) -> list[Event]:
        """Return the last events at the end of the output. Call it once. whole: the model itself ended the output"""
        ...


def merged(events: list[Event]) -> list[Event]:
    """Return the same events with neighbouring deltas of one kind joined."""
    if len(events) < 2:
        return events
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case (ContentDelta(a), ContentDelta(b)):
                out[-1] = ContentDelta(a + b)
            case (ReasoningDelta(a), ReasoningDelta(b)):
                out[-1] = ReasoningDelta(a + b)
            case (ToolCallDelta(i, a), ToolCallDelta(j, b)) if i == j:
                out[-1] = ToolCallDelta(i, a + b)
            case _:
                out.append(event)
    return out
