"""A turn reads one choice of a conversation as events."""

import pytest

from jaxserve.api.generate.choice_parser import ChoiceParser, RawInputParser
from jaxserve.api.generate.generation import Usage
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from jaxserve.text.output_parser import ParserChoice
from jaxserve.types.step import FinishReason

FIRST: list[Event] = [ToolCallStart(0, "a", "f"), ToolCallDelta(0, "{}"), ToolCallEnd(0)]
SECOND: list[Event] = [ToolCallStart(1, "b", "f"), ToolCallDelta(1, "{}"), ToolCallEnd(1)]


class Scripted:
    """A parser that returns the events of each output in turn."""

    thinking = True

    def __init__(self, *events: list[Event]) -> None:
        self._events = list(events)

    def feed(self, delta: str) -> list[Event]:
        return list(self._events.pop(0))

    def finish(self, *, whole: bool = False) -> list[Event]:
        return []


def output(tokens: int = 1, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r", 0, text="x", token_ids=[1] * tokens, finish_reason=reason)


def test_without_parallel_calls_nothing_follows_the_first_even_in_the_same_output() -> None:
    parser = ChoiceParser(Scripted([*FIRST, *SECOND, ContentDelta("more")]), Usage(), parallel=False)
    assert parser.read(output()) == FIRST
    assert parser.ended and parser.num_calls == 1


def test_parallel_calls_are_counted() -> None:
    parser = ChoiceParser(Scripted(FIRST, SECOND), Usage())
    assert parser.read(output()) + parser.read(output()) == [*FIRST, *SECOND]
    assert parser.num_calls == 2 and not parser.ended


def test_tokens_of_the_reasoning_and_its_tags_are_counted() -> None:
    usage = Usage()
    parser = ChoiceParser(Scripted([], [ReasoningDelta("a")], [], [ContentDelta("b")], [ContentDelta("c")]), usage)
    for tokens in (1, 2, 1, 1):  # the opening tag, two tokens of the reasoning, the closing tag, text
        parser.read(output(tokens))
    parser.read(output(1, FinishReason.STOP))
    assert usage.reasoning_tokens == 4 and parser.ended


@pytest.mark.parametrize(
    "text, calls", [("<think>hm, which", 0), ("<think>hm</think>\n", 0), ("", 1), ("<think>a</think>b", 1)]
)
def test_an_output_that_ends_in_its_reasoning_calls_no_tool(text: str, calls: int) -> None:
    parser = RawInputParser("sql", ParserChoice(reasoning="deepseek_v3").make())
    events = [event for char in text for event in parser.feed(char)] + parser.finish()
    assert sum(isinstance(event, ToolCallStart) for event in events) == calls
    assert sum(isinstance(event, ToolCallEnd) for event in events) == calls
