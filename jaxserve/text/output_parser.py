"""Parsers of a model's output: which ones read it, and the parsers of reasoning. Tool calls are parsed in text/tools.

The parsers are chosen when the server starts and made for each output:

    choice = choose_parsers(template_source, tool="auto", reasoning="auto")
    parser = choice.make(tools=ToolSet(...), prompt=rendered_prompt)
    events = parser.feed(delta) ... parser.finish()

    ThinkParser, LaterThoughts   reasoning between two tags before the answer: DeepSeek R1, Qwen3, GLM, Kimi K2,
                                 Mistral, Granite and similar models
    ThinkingLimit                counts the tokens of the reasoning

Formats whose output is a list of messages (gpt-oss, Muse Glimmer) have one parser for all, in tools/channels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from jaxserve.errors import ConfigError
from jaxserve.text.events import ContentDelta, Event, OutputParser, ReasoningDelta, ToolCallStart, merged
from jaxserve.text.reader import Reading, TextReader
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tools import ToolParser, ToolSet
from jaxserve.text.tools.channels import CHANNELS, Thoughts
from jaxserve.text.tools.format import CallOpening
from jaxserve.text.tools.registry import TOOL_FORMATS, known_tool_formats, tool_format_of_template
from jaxserve.types.sampling import ThinkingForm


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """A family of models that think between tags.

    always: the model thinks though neither the prompt nor its output opens the tag
    calls: tool calls that end the thinking without its closing tag
    tokens: special tokens of the tags, if a tag is more than one token
    answer: tags around the answer, which are dropped with the white space inside them; (): there are none
    """

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False
    calls: tuple[CallOpening, ...] = ()
    tokens: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()

    @property
    def are_sentences(self) -> bool:
        """Whether an answer may have the tags too, as Granite's."""
        return self.start[0].isalpha()

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Return the texts that the parser looks for. tools: whether the request offers tools"""
        return (self.start, self.end, *self.tokens, *((call.marker for call in self.calls) if tools else ()))

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Return whether the output begins inside the thinking.

        prompt: the rendered prompt; only its end counts, because users may write tags too
        continued: the assistant's own text that the output continues, if any
        """
        if continued:
            return continued.rfind(self.start) > continued.rfind(self.end)
        ending = prompt.rstrip()
        return ending.endswith(self.start) or (self.always and not ending.endswith(self.end))


class ThinkParser:
    """Splits an output into reasoning and content. White space around the tags is layout and is dropped.

    A block that follows the first directly, and end tags too many there, are read with it.

    keep: leave the tags and all white space in the reasoning, for callers that join both again
    only_first: what follows the first block is the answer, whatever it is
    tools: names of the request's tools; a call ends the thinking only if the request offers tools
    thinking: whether the text read so far ends within the thinking; None: its first characters may still open it
    """

    def __init__(
        self,
        tags: ThinkTags,
        *,
        inside: bool,
        keep: bool = False,
        only_first: bool = False,
        tools: Collection[str] = (),
    ) -> None:
        self._tags = tags
        self._keep = keep
        self._only_first = only_first
        self._inside = inside
        self._tools = tools
        self.thinking: bool | None = True if inside else None
        self.reader = TextReader()
        self._events: list[Event] = []
        self._space: list[str] = []  # white space that is dropped if the reasoning ends here
        self._in_block = False  # the block has had text
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
        while (yield from self._block()):
            self._space, self._in_block = ["\n"] * bool(self._space), False

    def _block(self) -> Reading[bool]:
        """Read a block, and the tags and white space behind it; return whether another has begun there."""
        calls = {call.marker: call for call in self._tags.calls} if self._tools else {}
        while True:
            marker = yield from self.reader.copy_until((self._tags.end, *calls), self._reasoning, take=False)
            if marker not in calls:
                break
            found = yield from calls[marker].read(self.reader, self._tools)
            text = self.reader.unmark()
            if found:
                self._events.append(ContentDelta(text))
                return False
            self._reasoning(text)
        yield from self.reader.accept(marker)
        while marker:
            space = "" if marker == self._tags.start else (yield from self.reader.space())
            if self._keep:
                self._events.append(ReasoningDelta(marker + space))
            if marker == self._tags.start or self._only_first:
                return marker == self._tags.start
            marker = yield from self.reader.accept(self._tags.start, self._tags.end)
        return False

    def _reasoning(self, text: str) -> None:
        if self._keep:
            self._events.append(ReasoningDelta(text))
            return
        text = text if self._in_block else text.lstrip()
        stripped = text.rstrip()
        if stripped:
            self._events.append(ReasoningDelta("".join(self._space) + stripped))
            self._space, self._in_block = [], True
        self._space.append(text[len(stripped) :])


class LaterThoughts:
    """Takes tags out of the text after the first thinking: a second block is reasoning, a lone end tag is dropped.

    Tags that the text mentions stay: in code, after a quotation mark, and an end tag after a start tag that stayed. A
    start tag within a line, behind a space, opens a block only if the model has thought before, and tags that are
    sentences count only then and at the beginning of a line.

    keep: leave the tags and all white space in the reasoning, as in ThinkParser
    calls: texts that begin calls, which end a block; none if no call is in the text
    thinking: the text read so far ends within a block
    reasoned: the output has had reasoning
    """

    def __init__(self, tags: ThinkTags, *, keep: bool = False, calls: Collection[str] = ()) -> None:
        self._tags, self._keep, self._calls = tags, keep, calls
        self.thinking = self.reasoned = False
        self._mentions = 0  # start tags that stayed, less the end tags that stayed
        self._closes: tuple[str, ...] = ()  # what ends an answer that has begun with a tag
        self._events: list[Event] = []
        self._begin()

    def _begin(self) -> None:
        self._reader = TextReader()
        self._run = self._parts()
        self._seeks_tag = not self._tags.answer  # `_parts` waits for the next tag
        self._code = _CodeMarks()
        self._last = ""  # the last character sent since the beginning or the last call
        self._space = ""  # white space of a block, dropped if the block ends here
        self._in_block = False  # the block has had text

    def feed(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        tags = self._tags
        is_plain = tags.start[0] not in text and tags.end[0] not in text and not (self._closes and "\n" in text)
        if self._seeks_tag and self._reader.is_empty and is_plain:
            self._content(text)  # the common case
        else:
            self._reader.push(text)
            next(self._run, None)
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """Return the text held back, at the end of the output or before a call, which also ends a block."""
        self._reader.closed = True
        next(self._run, None)
        events, self._events = self._events, []
        self.thinking = False
        self._begin()
        return events

    def _parts(self) -> Reading[None]:
        start, end = self._tags.start, self._tags.end
        if self._tags.answer and not self._closes:
            yield from self._answer_opens(*self._tags.answer)
        while marker := (yield from self._reader.copy_until((start, end, *self._closes), self._content)):
            self._seeks_tag = False
            if marker in self._closes and not self._code.inside:
                self._closes = ()
                yield from self._reader.space()
                self._seeks_tag = True
                continue
            is_mention = self._code.inside or self._last in tuple("\"'“‘«")
            if self._tags.are_sentences:
                is_mention = is_mention or not (self.reasoned and self._code.is_line_blank)
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
                self._tag(start)
                marker = yield from self._reader.copy_until((end, *self._calls), self._thought, take=False)
                yield from self._reader.accept(end)
                self.thinking, self._space = False, ""
            if marker == end:
                self._tag(end)
                space = yield from self._reader.space()
                if self._keep or (self._last and not self._last.isspace()):
                    self._content(space)
            self._seeks_tag = True

    def _answer_opens(self, first: str, last: str) -> Reading[None]:
        """Drop the tag in front of the answer, if it is there, and look for the one behind it."""
        space = yield from self._reader.space()
        if (yield from self._reader.accept(first)):
            yield from self._reader.space()
            self._closes = (f"\n{last}", last)
        else:
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

    def _tag(self, tag: str) -> None:
        if self._keep:
            self._events.append(ReasoningDelta(tag))

    def _thought(self, text: str) -> None:
        if self._keep:
            self._tag(text)
            return
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
        self._ticks = 0  # backticks in the last line
        self._head = ""  # the first three characters of the last line, without white space before

    @property
    def inside(self) -> bool:
        return self._fenced or self._ticks % 2 == 1 or self._head == "```"

    @property
    def is_line_blank(self) -> bool:
        return not self._head

    def add(self, text: str) -> None:
        """Follow the next text. One without backticks and line breaks only matters at the beginning of a line."""
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


class ThinkingLimit:
    """Counts the tokens of one output, and follows its text, until the thinking is over or has taken too long.

    tokens: tokens that the output may have before its thinking is ended
    inside, only_first, tools: as in ThinkingForm
    """

    def __init__(
        self, tags: ThinkTags, tokens: int, *, inside: bool, only_first: bool = False, tools: Collection[str] = ()
    ) -> None:
        self._parser = ThinkParser(tags, inside=inside, only_first=only_first, tools=tools)
        self._left = tokens

    @property
    def exceeded(self) -> bool:
        """Whether the output still thinks and has had all its tokens."""
        return self._left <= 0 and self._parser.thinking is True

    def add(self, text: str) -> None:
        """Count one token and read its text. The time is linear in the text of the thinking."""
        self._left -= 1
        if text and self._parser.thinking is not False:
            self._parser.feed(text)


REASONING_FAMILIES: dict[str, ThinkTags] = {
    "qwen3": ThinkTags(calls=TOOL_FORMATS["hermes"].openings),
    "deepseek_r1": ThinkTags(always=True),
    "deepseek_v3": ThinkTags(),
    "glm45": ThinkTags(calls=TOOL_FORMATS["glm45"].openings),
    "kimi_k2": ThinkTags(calls=TOOL_FORMATS["kimi_k2"].openings),
    "kimi": ThinkTags("◁think▷", "◁/think▷"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
    "hy_v3": ThinkTags("<think:opensource>", "</think:opensource>"),
    "gemma4": ThinkTags("<|channel>thought", "<channel|>", tokens=("<|channel>",)),
    "apertus": ThinkTags("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere": ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    "ernie45": ThinkTags(calls=TOOL_FORMATS["hermes"].openings, answer=("<response>", "</response>")),
    "granite": ThinkTags("Here is my thought process:", "Here is my response:"),
}


def think_tags(family: str | None, tool: str | None = None) -> ThinkTags | None:
    """Return the tags of a family of REASONING_FAMILIES, with the calls of the format `tool`; else None."""
    tags = REASONING_FAMILIES.get(family or "")
    form = TOOL_FORMATS.get(tool or "")
    return replace(tags, calls=form.openings) if tags is not None and form is not None and form.openings else tags


# names that users of SGLang and vLLM know
REASONING_ALIASES: dict[str, str] = {
    "qwen": "qwen3",
    "qwen3_thinking": "deepseek_r1",
    "deepseek": "deepseek_r1",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm": "glm45",
    "glm47": "glm45",
    "holo2": "qwen3",
    "nano_v3": "deepseek_v3",
    "nemotron_v3": "deepseek_v3",
    "think": "deepseek_v3",
    "step3": "deepseek_r1",
    "minimax": "deepseek_r1",
    "minimax_m2": "deepseek_r1",
    "interns1": "qwen3",
    "olmo3": "deepseek_v3",
    "ernie_x1": "ernie45",
    "mimo": "qwen3",
    "lfm2": "deepseek_v3",
    "step3p5": "deepseek_v3",
    "poolside_v1": "glm45",
    "hunyuan": "hy_v3",
    "apertus2509": "apertus",
    "magistral": "mistral",
    "gpt_oss": "harmony",
    "openai_gptoss": "harmony",
    "muse": "muse_glimmer",
}


def reasoning_of_template(template: str) -> str | None:
    """Return the reasoning family that a chat template's text shows; None if it shows none."""
    if (name := tool_format_of_template(template)) in CHANNELS:
        return name
    if "</think>" in template or "<think>" in template:
        return _think_family(template)
    by_tag = {tags.start: name for name, tags in REASONING_FAMILIES.items() if tags.start != "<think>"}
    return next((name for tag, name in by_tag.items() if tag in template), None)


def _think_family(template: str) -> str:
    """Return the key in REASONING_FAMILIES of a template with <think> tags.

    These families differ in the tool calls that end the reasoning without </think>. deepseek_r1 is never returned: a
    template does not show that the model thinks without an opening tag.
    """
    if "<|tool_calls_section_begin|>" in template:
        return "kimi_k2"
    if "<response>" in template:
        return "ernie45"
    if "<arg_key>" in template:
        return "glm45"
    if "<tool_call>" in template:
        return "qwen3"
    return "deepseek_v3"


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """Names of the parsers of a model, or None. One of CHANNELS reads both in one pass.

    The prompt decides where an output begins: inside the thinking if the template opened the tag.
    """

    tool: str | None = None
    reasoning: str | None = None

    @property
    def think_tags(self) -> ThinkTags | None:
        return think_tags(self.reasoning, self.tool)

    @property
    def channels(self) -> str | None:
        """The format that reads both, whichever of the two names it."""
        return next((name for name in (self.tool, self.reasoning) if name in CHANNELS), None)

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

        tools: None leaves calls in the text (a request without tools, or with tool_choice none)
        prompt: the rendered prompt; continued: the assistant's text that the output continues, if any
        separate_reasoning: False leaves the reasoning, with its tags, in the content
        fallback_tool: family for a model that has none (required calls are then plain JSON: "json")
        answer_is_literal: a constraint decides the answer, so tags in it are text
        thinks: False if the output is all answer, because a constraint holds from its first token
        """
        if self.channels is not None:
            return _Messages(CHANNELS[self.channels](tools), separate_reasoning)
        form = TOOL_FORMATS.get(self.tool or fallback_tool or "")
        tool_parser = form.parser(tools) if form is not None and tools is not None else None
        tags = self.think_tags
        if tags is None or not thinks:
            return _Pipeline(None, tool_parser, True)
        inside = tags.opened_by(prompt, continued)
        if not separate_reasoning and tool_parser is None:
            return _Pipeline(None, None, True)
        names = tools.names if tools is not None and tool_parser is not None else ()
        thinking = ThinkParser(
            tags, inside=inside, keep=not separate_reasoning, only_first=answer_is_literal, tools=names
        )
        cleans = separate_reasoning and not answer_is_literal
        return _Pipeline(thinking, tool_parser, separate_reasoning, LaterThoughts(tags) if cleans else None)

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Return the texts that the parsers look for. If one is a special token, detokenizing must not skip it."""
        if self.channels is not None:
            return CHANNELS[self.channels].markers
        found = TOOL_FORMATS[self.tool].parser.markers if tools and self.tool else ()
        return found + (self.think_tags.markers(tools=tools) if self.think_tags else ())

    def visible_token_ids(self, tokenizer: Tokenizer, *, tools: bool) -> tuple[int, ...]:
        """Return the ids of the special tokens that must stay in the text (SamplingParams.visible_token_ids)."""
        ids = (tokenizer.token_to_id(marker) for marker in self.markers(tools=tools))
        return tuple(i for i in ids if i is not None and i in tokenizer.special_ids)


def choose_parsers(
    template: str | None = None, for_tools: str | None = None, *, tool: str = "auto", reasoning: str = "auto"
) -> ParserChoice:
    """Return the parsers that `model.tool_parser` and `model.reasoning_parser` name.

    Each is a name that users of SGLang or vLLM know, "auto" (by the chat template's text) or "none". Raises ConfigError
    with the known names for any other.

    for_tools: the template of requests with tools, if it differs
    """
    calls = tool_format_of_template(for_tools or "") or tool_format_of_template(template or "")
    known_reasoning = {name: name for name in (*REASONING_FAMILIES, *CHANNELS)} | REASONING_ALIASES
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
    """Parses the reasoning first, then tool calls in the rest, then later reasoning in the text beside the calls."""

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


def thoughts_of(form: ThinkingForm) -> _Pipeline | Thoughts:
    """Return the parser that divides an output of this form into reasoning and answer, and keeps all of its text."""
    tags = think_tags(form.family, form.calls)
    if tags is None:
        return Thoughts(CHANNELS[form.family])
    first = ThinkParser(tags, inside=form.inside, keep=True, only_first=form.only_first, tools=form.tools)
    calls = [call.marker for call in tags.calls] if form.tools else ()
    later = None if form.only_first else LaterThoughts(tags, keep=True, calls=calls)
    return _Pipeline(first, None, True, later)


class _Messages:
    def __init__(self, parser: ToolParser, separate: bool) -> None:
        self._parser = parser
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
