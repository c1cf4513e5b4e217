"""Read one choice of a conversation as events: parse its text, count its reasoning tokens, limit its calls.

The answer of every API is written from these events.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable

from jaxserve.api.generate.generation import Usage
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.events import (
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from jaxserve.types.step import FinishReason

_SOUGHT = 64  # characters of an event that are searched in the output's text to find its place


class ChoiceParser:
    """Turn the outputs of one choice into events.

    parallel: False ends the choice after its first call
    token_bytes: returns the bytes of a token, so that the reasoning tokens of an output can be told from later ones;
      None: all tokens of such an output count as reasoning
    ended: no event follows. A choice may end before its engine output does.
    """

    def __init__(
        self,
        parser: OutputParser,
        usage: Usage,
        *,
        parallel: bool = True,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        self.num_calls = 0
        self.ended = False
        self._parser = parser
        self._usage = usage
        self._parallel = parallel
        self._token_bytes = token_bytes
        self._thinking = False
        self._unsure_tokens = 0  # tokens that are in no event yet, so they may belong to the reasoning or follow it

    def read(self, output: RequestOutput) -> list[Event]:
        """Return the events that `output` completes."""
        events = self._parser.feed(output.text) if output.text else []
        if output.finish_reason is not None:
            ended_by_model = output.finish_reason is FinishReason.STOP and not isinstance(output.matched_stop, str)
            events += self._parser.finish(whole=ended_by_model)
            self.ended = True
        elif len(events) == 1 and type(events[0]) is ContentDelta and not self._thinking:
            self._unsure_tokens = 0  # the common case
            return events
        self._count_reasoning(events, output)
        return self._limited(events)

    def _limited(self, events: list[Event]) -> list[Event]:
        """Count the calls. Without parallel calls, drop the events after the first call."""
        for number, event in enumerate(events):
            if isinstance(event, ToolCallStart):
                self.num_calls += 1
            elif isinstance(event, ToolCallEnd) and not self._parallel:
                self.ended = True
                return events[: number + 1]
        return events

    def _count_reasoning(self, events: list[Event], output: RequestOutput) -> None:
        """Count tokens of the reasoning and its tags. A token without an event is counted with the next event."""
        num_tokens = len(output.token_ids)
        self._unsure_tokens += num_tokens
        for event, following in itertools.zip_longest(events, events[1:]):
            if isinstance(event, ReasoningDelta):
                self._thinking = True
                later = 0 if following is None else self._tokens_after(event, following, output)
                self._usage.reasoning_tokens += max(0, self._unsure_tokens - later)
            elif self._thinking:
                self._thinking = False
                self._usage.reasoning_tokens += max(0, self._unsure_tokens - num_tokens)
            self._unsure_tokens = 0
        if self._thinking and not self._parser.thinking:  # the head of a call follows, which is not an event yet
            self._thinking = False
            self._usage.reasoning_tokens += max(0, self._unsure_tokens - num_tokens)
            self._unsure_tokens = min(self._unsure_tokens, num_tokens)

    def _tokens_after(self, reasoning: ReasoningDelta, following: Event, output: RequestOutput) -> int:
        """Return how many of the output's tokens have text after its reasoning and the tag behind it."""
        if self._token_bytes is None or len(output.token_ids) < 2:
            return 0
        ending = reasoning.text[-_SOUGHT:]
        start = output.text.find(ending) + len(ending)
        if isinstance(following, ContentDelta):
            start = max(start, output.text.find(following.text[:_SOUGHT], start))
        room = len(output.text[:start].encode())
        for number, token_id in enumerate(output.token_ids):
            room -= len(self._token_bytes(token_id))
            if room < 0:
                return len(output.token_ids) - number
        return 0


class RawInputParser:
    """Parse an output that is only the input of one custom tool, after its reasoning.

    An output that is only reasoning has no call, because its end was cut off.
    """

    def __init__(self, name: str, reasoning: OutputParser) -> None:
        self._name = name
        self._reasoning = reasoning
        self._begun = False
        self._reasoned = False

    def feed(self, delta: str) -> list[Event]:
        return self._through(self._reasoning.feed(delta))

    @property
    def thinking(self) -> bool:
        return self._reasoning.thinking

    def finish(self, *, whole: bool = False) -> list[Event]:
        events = self._through(self._reasoning.finish(whole=whole))
        if self._reasoned and not self._begun:
            return events
        return [*events, *(() if self._begun else [self._start()]), ToolCallEnd(0)]

    def _through(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                out += [] if self._begun else [self._start()]
                out.append(ToolCallDelta(0, event.text))
            else:
                self._reasoned = True
                out.append(event)
        return out

    def _start(self) -> ToolCallStart:
        self._begun = True
        return ToolCallStart(0, f"call_{secrets.token_hex(12)}", self._name, custom=True)
