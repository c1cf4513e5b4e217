"""Which parsers read a model's output: chosen once at the start, made once for each output.

choice = choose_parsers(template_source, tool="auto", reasoning="auto")           # at the start
parser = choice.make(tools=ToolSet(...), prompt=rendered_prompt)                   # one an output
events = parser.feed(delta) ... parser.finish()
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.errors import ConfigError
from jaxserve.text.events import ContentDelta, Event, OutputParser, ReasoningDelta, ToolCallStart, merged
from jaxserve.text.output.harmony import HarmonyParser
from jaxserve.text.reasoning import (
    REASONING_ALIASES,
    REASONING_FAMILIES,
    LaterThoughts,
    ThinkParser,
    ThinkTags,
    reasoning_of_template,
    think_tags,
)
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tools import ToolParser, ToolSet
from jaxserve.text.tools.registry import TOOL_FORMATS, known_tool_formats, tool_format_of_template


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """Names of the parsers of a model, or None. "harmony" reads both in one pass.

    The prompt decides where an output begins: inside the thinking if the template opened the tag.
    """

    tool: str | None = None
    reasoning: str | None = None

    @property
    def think_tags(self) -> ThinkTags | None:
        return think_tags(self.reasoning, self.tool)

    @property
    def harmony(self) -> bool:
        return "harmony" in (self.tool, self.reasoning)

    def make(
        self,
        *,
        tools: ToolSet | None = None,
        prompt: str = "",
        continued: str = "",
        separate_reasoning: bool = True,
        fallback_tool: str | None = None,
        answer_is_literal: bool = False,
        thinks: bool = True,
    ) -> OutputParser:
        """Return a parser for one output.

        tools: None leaves calls in the text (no tools in the request, or tool_choice none)
        prompt: the rendered prompt; continued: the assistant's text that the output continues, if any
        separate_reasoning: False leaves the reasoning, with its tags, in the content
        fallback_tool: family for a model that has none (required calls are then plain JSON: "json")
        answer_is_literal: a constraint decides what the answer is; tags in it are its text
        thinks: False if the output is all answer, because a constraint holds from its first token
        """
        if self.harmony:
            return _Harmony(tools, separate_reasoning)
        form = TOOL_FORMATS.get(self.tool or fallback_tool or "")
        tool_parser = form.parser(tools) if form is not None and tools is not None else None
        tags = self.think_tags
        if tags is None or not thinks:
            return _Pipeline(None, tool_parser, True)
        inside = tags.opened_by(prompt, continued)
        if not separate_reasoning and tool_parser is None:
            return _Pipeline(None, None, True)
        names = tools.names if tools is not None and tool_parser is not None else ()
        thinking = ThinkParser(tags, inside=inside, keep=not separate_reasoning, tools=names)
        # Granite's tags are sentences, which an answer may have too
        cleans = separate_reasoning and not answer_is_literal and not tags.start[0].isalpha()
        return _Pipeline(thinking, tool_parser, separate_reasoning, LaterThoughts(tags) if cleans else None)

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Return the texts that the parsers look for. If one is a special token, detokenizing must not skip it."""
        if self.harmony:
            return HarmonyParser.markers
        found = TOOL_FORMATS[self.tool].parser.markers if tools and self.tool else ()
        return found + (self.think_tags.markers(tools=tools) if self.think_tags else ())

    def visible_token_ids(self, tokenizer: Tokenizer, *, tools: bool) -> tuple[int, ...]:
        """Return the ids of the special tokens that must stay in the text (SamplingParams.visible_token_ids)."""
        ids = (tokenizer.token_to_id(marker) for marker in self.markers(tools=tools))
        return tuple(i for i in ids if i is not None and i in tokenizer.special_ids)


def choose_parsers(
    template: str | None = None, for_tools: str | None = None, *, tool: str = "auto", reasoning: str = "auto"
) -> ParserChoice:
    """Resolve `model.tool_parser` and `model.reasoning_parser`: a name that SGLang's or vLLM's users know, "auto"
    (by the chat template's text) or "none". Raises ConfigError naming the known ones.

    for_tools: the template of requests with tools, if it is another one
    """
    calls = tool_format_of_template(for_tools or "") or tool_format_of_template(template or "")
    known_reasoning = {name: name for name in (*REASONING_FAMILIES, "harmony")} | REASONING_ALIASES
    return ParserChoice(
        tool=_resolve(tool, known_tool_formats(), calls, "tool_parser"),
        reasoning=_resolve(reasoning, known_reasoning, reasoning_of_template(template or ""), "reasoning_parser"),
    )


def _resolve(name: str, known: dict[str, str], detected: str | None, key: str) -> str | None:
    wanted = name.lower().replace("-", "_")
    if wanted == "auto":
        return detected
    if wanted in ("none", ""):
        return None
    if wanted not in known:
        raise ConfigError(f"model.{key}: {name!r} is not known", fix=f"one of auto, none, {', '.join(sorted(known))}")
    return known[wanted]


class _Pipeline:
    """Reasoning first, then the tool calls in what remains, then later reasoning in what is no call."""

    def __init__(
        self,
        reasoning: ThinkParser | None,
        tools: ToolParser | None,
        separate: bool,
        later: LaterThoughts | None = None,
    ) -> None:
        self._reasoning, self._tools, self._separate, self._later = reasoning, tools, separate, later

    def feed(self, delta: str) -> list[Event]:
        plain: list[Event] = [ContentDelta(delta)] if delta else []
        events = self._reasoning.feed(delta) if self._reasoning else plain
        if self._tools is None and self._separate:
            return self._without_tags(events)
        return merged(self._without_tags(self._through(events)))

    @property
    def thinking(self) -> bool:
        is_first = self._reasoning is not None and self._reasoning.thinking is not False
        return is_first or (self._later is not None and self._later.thinking)

    def finish(self, *, whole: bool = False) -> list[Event]:
        events = self._through(self._reasoning.finish() if self._reasoning else [])
        events = self._without_tags(events + (self._tools.finish(whole=whole) if self._tools else []))
        return merged(events + (self._later.flush() if self._later else []))

    def _through(self, events: Iterable[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta) and self._tools is not None:
                out += self._tools.feed(event.text)
            elif isinstance(event, ReasoningDelta) and not self._separate:
                out.append(ContentDelta(event.text))
            else:
                out.append(event)
        return out

    def _without_tags(self, events: list[Event]) -> list[Event]:
        if self._later is None:
            return events
        out: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                out += self._later.feed(event.text)
                continue
            if isinstance(event, ReasoningDelta):
                self._later.reasoned = True
            elif isinstance(event, ToolCallStart):
                out += self._later.flush()
            out.append(event)
        return out


class _Harmony:
    def __init__(self, tools: ToolSet | None, separate: bool) -> None:
        self._parser = HarmonyParser(tools)
        self._separate = separate

    def feed(self, delta: str) -> list[Event]:
        return self._through(self._parser.feed(delta))

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    def finish(self, *, whole: bool = False) -> list[Event]:
        return self._through(self._parser.finish(whole=whole))

    def _through(self, events: list[Event]) -> list[Event]:
        if self._separate:
            return events
        return merged([ContentDelta(e.text) if isinstance(e, ReasoningDelta) else e for e in events])
