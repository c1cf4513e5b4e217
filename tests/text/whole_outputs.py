"""Finished texts through a streaming parser, as one value to compare."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxserve.text.events import (
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""
    custom: bool = False
    ended: bool = False


@dataclass(slots=True)
class ParsedOutput:
    """A whole output. reasoning is None without any; content is None for an output of tool calls only."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Add events. A call must end before another begins, and once."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content = (self.content or "") + text
                case ReasoningDelta(text):
                    self.reasoning = (self.reasoning or "") + text
                case ToolCallStart(index, id, name, custom):
                    assert index == len(self.tool_calls) and self.all_ended
                    self.tool_calls.append(ToolCall(id, name, custom=custom))
                case ToolCallDelta(index, text):
                    assert not self.tool_calls[index].ended
                    self.tool_calls[index].arguments += text
                case ToolCallEnd(index):
                    assert not self.tool_calls[index].ended
                    self.tool_calls[index].ended = True

    @property
    def all_ended(self) -> bool:
        return all(call.ended for call in self.tool_calls)


def parse_whole(parser: OutputParser, text: str) -> ParsedOutput:
    """Parse a finished text."""
    output = ParsedOutput()
    output.add(parser.feed(text))
    output.add(parser.finish())
    assert output.all_ended
    if output.content is None and not output.tool_calls:
        output.content = ""
    return output
