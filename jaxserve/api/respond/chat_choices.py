"""Turn RequestOutputs into the choices of /v1/chat/completions.

One function makes the deltas. An unstreamed answer joins those deltas, so both forms are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.api.generate.planner import ChatPlan
from jaxserve.api.generate.turn import Turn
from jaxserve.api.respond.extra_fields import ExtraFieldWriter
from jaxserve.api.respond.extras import last_vector
from jaxserve.api.respond.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.api.respond.wire import finish_fields, is_object
from jaxserve.api.shared.token_texts import TokenTexts
from jaxserve.api.tasks.chat import ChatOptions
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallStart
from jaxserve.types.step import FinishReason, TokenLogprobs

Chunk = dict[str, Any]


@dataclass
class _Choice:
    """The state of one choice."""

    index: int
    turn: Turn
    begun: bool = False
    custom: set[int] = field(default_factory=set)  # indices of the calls of custom tools
    arguments: list[str] = field(default_factory=list)  # texts of the last call
    held_reasoning: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of content tokens that no chunk has carried yet
    pending_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of tokens without an event since content
    in_content: bool = True  # the last event was content; at the start it may become content
    token_ids: list[int] = field(default_factory=list)


class ChatChoices:
    """The choices of one conversation.

    complete: every choice has ended. A choice may end before its engine output does.
    about_prompt: vLLM's prompt fields beside the choices, set with the first chunk; else empty
    """

    def __init__(self, plan: ChatPlan, options: ChatOptions, texts: TokenTexts) -> None:
        self._plan = plan
        self._options = options
        self._output = options.output
        self._texts = texts
        self._choices: dict[int, _Choice] = {}
        self._running = plan.prompt.params.n
        self._extra_fields = ExtraFieldWriter(self._output.extras, plan.generation.options.request_id)
        shown = self._output
        more = shown.token_ids or shown.hidden_state or self._extra_fields.wanted
        self._plain = shown.logprobs is None and not more
        self._no_reasoning = dict.fromkeys(options.reasoning_fields)
        self.about_prompt: dict[str, Any] = {}
        self._awaits_prompt_logprobs = self._output.prompt_logprobs is not None
        self.complete = False

    def take_about_prompt(self) -> dict[str, Any]:
        """Return `about_prompt` and clear it: only one chunk of a stream carries it."""
        found, self.about_prompt = self.about_prompt, {}
        return found

    def chunks(self, output: RequestOutput) -> list[Chunk]:
        """Return the chunks for `output`: the role once, deltas, and the finish reason in a chunk of its own."""
        choice = self._choices.get(output.index)
        if choice is None:
            choice = self._begin(output)
        if output.prompt_logprobs is not None and self._awaits_prompt_logprobs:
            self._describe_prompt_tokens(output.prompt_logprobs)
        turn = choice.turn
        if turn.ended:
            return []
        events = turn.read(output)
        chunks: list[Chunk]
        # most outputs are one piece of text and nothing else
        plain = self._plain and choice.begun and not choice.held_reasoning  # nothing stands beside the text
        if plain and len(events) == 1 and type(event := events[0]) is ContentDelta and event.text:
            delta = {"content": event.text, **self._no_reasoning}
            chunks = [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]
        else:
            self._collect(choice, events, output)
            chunks = self._deltas(choice, events)
        return chunks + self._last(choice, output) if turn.ended else chunks

    def _begin(self, output: RequestOutput) -> _Choice:
        if not self._choices:
            self.about_prompt = self._describe_prompt()
        choice = self._choices[output.index] = _Choice(output.index, self._plan.make_turn())
        return choice

    def _describe_prompt_tokens(self, entries: Sequence[TokenLogprobs | None]) -> None:
        """Add the prompt's log-probabilities once. The first output of a request whose thinking ended has none."""
        self._awaits_prompt_logprobs = False
        found = prompt_logprobs(entries, self._output.prompt_logprobs or 0, self._texts)
        self.about_prompt = self.about_prompt | {"prompt_logprobs": found}

    def _describe_prompt(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._output.prompt_token_ids:
            found["prompt_token_ids"] = self._plan.prompt.prompt_token_ids
        if self._output.prompt_text:
            found["prompt_text"] = self._plan.prompt_text
        return found

    def _collect(self, choice: _Choice, events: list[Event], output: RequestOutput) -> None:
        """Keep what the next chunk shows beside its delta."""
        if self._extra_fields.wanted:
            self._extra_fields.note(0, output)
        if self._output.logprobs is not None:
            self._collect_logprobs(choice, events, output)
        if self._output.token_ids:
            choice.token_ids += output.token_ids

    def _collect_logprobs(self, choice: _Choice, events: list[Event], output: RequestOutput) -> None:
        """Keep the entries of the content's tokens: their texts join to it, as far as tokens end where it does."""
        was_content, has_content = choice.in_content, False
        for event in events:
            if isinstance(event, ContentDelta):
                choice.in_content = has_content = True
            elif isinstance(event, ReasoningDelta | ToolCallStart):
                choice.in_content = False
        entries = list(output.logprobs or ())
        if isinstance(output.matched_stop, int) and not self._plan.prompt.params.include_stop_str_in_output:
            entries = entries[:-1]  # the token that ended the output is not in its text
        pending = choice.pending_logprobs if was_content else []
        if has_content:
            if isinstance(output.matched_stop, str):  # tokens of the stop string are among them
                size = sum(len(event.text.encode()) for event in events if isinstance(event, ContentDelta))
                entries, pending = self._within(size, pending + entries), []
            choice.logprobs += pending + entries
            choice.pending_logprobs = []
        else:
            choice.pending_logprobs = pending + entries if choice.in_content else []

    def _within(self, size: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Return the first entries, whose tokens have at most `size` bytes together."""
        ends = itertools.accumulate(len(self._texts.bytes(entry.token_id)) for entry in entries)
        return [entry for entry, end in zip(entries, ends, strict=True) if end <= size]

    def _deltas(self, choice: _Choice, events: list[Event]) -> list[Chunk]:
        chunks: list[Chunk] = []
        for event in events:
            delta = self._delta(choice, event)
            if delta is None:
                continue
            if not choice.begun:
                chunks.append(self._first(choice, isinstance(event, ContentDelta)))
            chunks.append(self._chunk(choice, delta))
        return chunks

    def _delta(self, choice: _Choice, event: Event) -> dict[str, Any] | None:
        match event:
            case ContentDelta(text):
                return {"content": text} if text else None
            case ReasoningDelta(text):
                return self._reasoning(choice, text)
            case ToolCallStart():
                return self._start_call(choice, event)
            case ToolCallDelta(index, text):
                return self._call_text(choice, index, text)
        return None

    def _reasoning(self, choice: _Choice, text: str) -> dict[str, Any] | None:
        if not self._options.include_reasoning:
            return None
        if not self._options.stream_reasoning:
            choice.held_reasoning += text
            return None
        return dict.fromkeys(self._options.reasoning_fields, text)

    def _start_call(self, choice: _Choice, event: ToolCallStart) -> dict[str, Any]:
        choice.arguments = []
        if self._options.legacy_calls:
            return {"function_call": {"name": event.name, "arguments": ""}}
        if event.custom:
            choice.custom.add(event.index)
            call: dict[str, Any] = {"type": "custom", "custom": {"name": event.name, "input": ""}}
        else:
            call = {"type": "function", "function": {"name": event.name, "arguments": ""}}
        return {"tool_calls": [{"index": event.index, "id": event.id} | call]}

    def _call_text(self, choice: _Choice, index: int, text: str) -> dict[str, Any]:
        choice.arguments.append(text)
        if self._options.legacy_calls:
            return {"function_call": {"arguments": text}}
        part = {"custom": {"input": text}} if index in choice.custom else {"function": {"arguments": text}}
        return {"tool_calls": [{"index": index} | part]}

    def _first(self, choice: _Choice, content: bool) -> Chunk:
        """Return the chunk with the role. Its content is null before reasoning or calls."""
        choice.begun = True
        text = self._options.echo or ("" if content else None)
        chunk: Chunk = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": text, "refusal": None, **self._no_reasoning},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._output.prompt_token_ids:
            chunk["prompt_token_ids"] = (
                self._plan.prompt.prompt_token_ids
            )  # where SGLang puts them; vLLM's are in about_prompt
        return chunk

    def _chunk(self, choice: _Choice, delta: dict[str, Any]) -> Chunk:
        """Build a delta with the log-probabilities and ids of all tokens since the last one."""
        reasoning: dict[str, Any] = self._no_reasoning
        if choice.held_reasoning:
            reasoning = dict.fromkeys(self._options.reasoning_fields, choice.held_reasoning)
            choice.held_reasoning = ""
        chunk: Chunk = {"index": choice.index, "delta": reasoning | delta, "logprobs": None, "finish_reason": None}
        if choice.logprobs:
            watched, top = self._plan.prompt.params.extras.logprob_token_ids, self._output.logprobs or 0
            chunk["logprobs"] = chat_logprobs(choice.logprobs, top, self._texts, self._output.tokens_as_ids, watched)
            choice.logprobs = []
        if self._output.token_ids:
            chunk["token_ids"], choice.token_ids = choice.token_ids, []
        return chunk

    def _last(self, choice: _Choice, output: RequestOutput) -> list[Chunk]:
        self._running -= 1
        self.complete = self._running == 0
        if output.finish_reason is None and not self.complete:
            self._plan.prompt.signal.abort_choice(choice.index)
        prompt, num_calls = self._plan.prompt, choice.turn.num_calls
        chunks = [] if choice.begun else [self._first(choice, num_calls == 0 and not choice.held_reasoning)]
        finish = finish_fields(output, prompt.params.stop_token_ids)
        if num_calls and output.finish_reason in (None, FinishReason.STOP) and not _cuts_call(choice, output):
            finish["finish_reason"] = "function_call" if self._options.legacy_calls else "tool_calls"
        if self._extra_fields.wanted:
            finish |= self._extra_fields.finish(0, prompt, output)
        if self._output.hidden_state:
            chunks.append(self._chunk(choice, {"hidden_states": last_vector(output)}))
        return [*chunks, self._chunk(choice, {}) | finish]


def _cuts_call(choice: _Choice, output: RequestOutput) -> bool:
    """Return whether a stop string ended the output in the arguments of a function: such a call cannot be run."""
    if not isinstance(output.matched_stop, str) or choice.turn.num_calls - 1 in choice.custom:
        return False
    return not is_object("".join(choice.arguments))


class JoinedMessage:
    """Join the chunks of one choice into an unstreamed answer, in linear time."""

    def __init__(self, index: int) -> None:
        self._message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
        self._choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None, "token_ids": None}
        self._texts: dict[str, list[str]] = {}  # of the message, by key
        self._function_call: dict[str, list[str]] = {}
        # values known at once, texts that grow
        self._calls: list[tuple[dict[str, Any], dict[str, dict[str, list[str]]]]] = []
        self._logprobs: list[Any] = []
        self._token_ids: list[int] = []

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        for key, value in chunk["delta"].items():
            if key == "tool_calls":
                self._add_call(value[0])
            elif key == "function_call":
                _extend(self._function_call, value)
            elif key == "hidden_states":
                self._choice[key] = value
            elif key == "role":
                self._message[key] = value
            else:
                self._message.setdefault(key)
                if value is not None:
                    self._texts.setdefault(key, []).append(value)
        if chunk["logprobs"] is not None:
            self._logprobs += chunk["logprobs"]["content"]
            self._choice["logprobs"] = chunk["logprobs"] | {"content": self._logprobs}
        if "token_ids" in chunk:
            self._token_ids += chunk["token_ids"]
            self._choice["token_ids"] = self._token_ids
        apart = ("index", "delta", "logprobs", "token_ids")
        self._choice |= {key: value for key, value in chunk.items() if key not in apart}

    def _add_call(self, delta: dict[str, Any]) -> None:
        if "id" in delta:
            known = {key: value for key, value in delta.items() if key != "index" and not isinstance(value, dict)}
            self._calls.append((known, {}))
        for key, value in delta.items():
            if isinstance(value, dict):
                _extend(self._calls[-1][1].setdefault(key, {}), value)

    def result(self) -> dict[str, Any]:
        """Build the choice of the unstreamed answer."""
        message = self._message | _whole(self._texts)
        if self._function_call:
            message["function_call"] = _whole(self._function_call)
        if self._calls:
            message["tool_calls"] = [
                known | {key: _whole(pieces) for key, pieces in texts.items()} for known, texts in self._calls
            ]
        index = self._choice.pop("index")
        return {"index": index, "message": message} | self._choice


def _extend(texts: dict[str, list[str]], part: dict[str, str]) -> None:
    for key, value in part.items():
        texts.setdefault(key, []).append(value)


def _whole(texts: dict[str, list[str]]) -> dict[str, str]:
    return {key: "".join(pieces) for key, pieces in texts.items()}
