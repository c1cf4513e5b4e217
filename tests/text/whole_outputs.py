"""Finished texts through a streaming parser, as one value to compare."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxserve.text.events import ContentDelta, Event, OutputParser, ReasoningDelta, ToolCallDelta, ToolCallStart


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""
    custom: bool = False


@dataclass(slots=True)
class ParsedOutput:
    """A whole output. reasoning is None without any; content is None for an output of tool calls only."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content = (self.content or "") + text
                case ReasoningDelta(text):
                    self.reasoning = (self.reasoning or "") + text
                case ToolCallStart(_, id, name, custom):
                    self.tool_calls.append(ToolCall(id, name, custom=custom))
                case ToolCallDelta(index, text):
                    self.tool_calls[index].arguments += text


def parse_whole(parser: OutputParser, text: str) -> ParsedOutput:
    """Parse a finished text."""
    output = ParsedOutput()
    output.add(parser.feed(text))
    output.add(parser.finish())
    if output.content is None and not output.tool_calls:
        output.content = ""
    return output
