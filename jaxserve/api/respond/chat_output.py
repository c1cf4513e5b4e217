"""Turn RequestOutputs into the choices of /v1/chat/completions.

One function makes the deltas. An unstreamed answer joins those deltas, so both forms are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxserve.api.generate.generation import Job, Usage
from jaxserve.api.protocol.chat import ChatCompletionRequest
from jaxserve.api.respond.details import last_vector
from jaxserve.api.respond.extras import Extras
from jaxserve.api.respond.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.api.respond.wire import finish_fields
from jaxserve.api.shared.token_texts import TokenTexts
from jaxserve.text.events import (
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from jaxserve.text.output.sequence_text import RequestOutput
from jaxserve.types.output import FinishReason, TokenLogprobs

Chunk = dict[str, Any]


@dataclass
class _Choice:
    """The state of one choice."""

    index: int
    parser: OutputParser
    begun: bool = False
    done: bool = False
    num_calls: int = 0
    custom: set[int] = field(default_factory=set)  # indices of the calls of custom tools
    thinking: bool = False
    unsure_tokens: int = 0  # tokens not yet in an event: of the reasoning, or of what follows it
    held_reasoning: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of tokens that no chunk has carried yet
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ChatOptions:
    """The output options of a request."""

    parallel: bool = True  # False: an output ends after its first call
    legacy: bool = False  # function_call instead of tool_calls
    echo: str = ""  # text of the last message, returned before the output
    prompt_text: str = ""
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)  # in every message and delta


class ChatChoices:
    """The choices of one conversation.

    about_prompt: vLLM's prompt fields beside the choices, set with the first chunk; else empty
    """

    def __init__(
        self,
        body: ChatCompletionRequest,
        job: Job,
        texts: TokenTexts,
        usage: Usage,
        make_parser: Callable[[], OutputParser],
        options: ChatOptions,
        extras: Extras,
    ) -> None:
        self._body = body
        self._job = job
        self._texts = texts
        self._usage = usage
        self._make_parser = make_parser
        self._options = options
        self._choices: dict[int, _Choice] = {}
        self._running = job.params.n
        self._extras = extras
        self._plain = not (body.logprobs or body.return_token_ids or body.return_hidden_states or extras.wanted)
        self._no_reasoning = dict.fromkeys(options.reasoning_fields)
        self.about_prompt: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        """Return whether every choice has ended. A choice may end before its engine output does."""
        return self._running == 0

    def take_about_prompt(self) -> dict[str, Any]:
        """Return `about_prompt` and clear it: only one chunk of a stream carries it."""
        said, self.about_prompt = self.about_prompt, {}
        return said

    def chunks(self, output: RequestOutput) -> list[Chunk]:
        """Return the chunks for `output`: the role once, deltas, and the finish reason in a chunk of its own."""
        choice = self._choices.get(output.index)
        if choice is None:
            if not self._choices:
                self.about_prompt = self._say_of_prompt(output)
            choice = self._choices[output.index] = _Choice(output.index, self._make_parser())
        if choice.done:
            return []
        if not (self._plain and choice.begun) or output.finish_reason is not None:
            return self._general(choice, output)
        events = choice.parser.feed(output.text) if output.text else []
        if len(events) == 1 and type(events[0]) is ContentDelta and not (choice.thinking or choice.held_reasoning):
            choice.unsure_tokens = 0
            # the common path for most tokens
            delta = {"content": events[0].text, **self._no_reasoning}
            return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]
        self._count_reasoning(choice, events, len(output.token_ids))
        return self._ended(choice, output, self._deltas(choice, events))

    def _say_of_prompt(self, first: RequestOutput) -> dict[str, Any]:
        body, said = self._body, dict[str, Any]()
        if body.return_token_ids or body.return_prompt_token_ids:
            said["prompt_token_ids"] = self._job.prompt_token_ids
        if body.return_prompt_text:
            said["prompt_text"] = self._options.prompt_text
        if body.prompt_logprobs is not None:
            said["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs or [], body.prompt_logprobs, self._texts)
        return said

    def _general(self, choice: _Choice, output: RequestOutput) -> list[Chunk]:
        if self._extras.wanted:
            self._extras.note(0, output)
        if self._body.logprobs:
            choice.logprobs += output.logprobs or ()
        if self._body.return_token_ids:
            choice.token_ids += output.token_ids
        events = choice.parser.feed(output.text) if output.text else []
        if output.finish_reason is not None:
            events += choice.parser.finish()
        self._count_reasoning(choice, events, len(output.token_ids))
        return self._ended(choice, output, self._deltas(choice, events))

    def _ended(self, choice: _Choice, output: RequestOutput, chunks: list[Chunk]) -> list[Chunk]:
        if output.finish_reason is None and not choice.done:
            return chunks
        self._running -= 1
        return chunks + self._last(choice, output)

    def _deltas(self, choice: _Choice, events: list[Event]) -> list[Chunk]:
        chunks: list[Chunk] = []
        for event in events:
            delta = self._delta(choice, event)
            if delta is None:
                continue
            if not choice.begun:
                chunks.append(self._first(choice, isinstance(event, ContentDelta)))
            chunks.append(self._chunk(choice, delta))
            if choice.done:
                break
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
            case ToolCallEnd():
                choice.done = not self._options.parallel
        return None

    def _reasoning(self, choice: _Choice, text: str) -> dict[str, Any] | None:
        if self._body.include_reasoning is False:
            return None
        if self._body.stream_reasoning is False:
            choice.held_reasoning += text
            return None
        return dict.fromkeys(self._options.reasoning_fields, text)

    def _start_call(self, choice: _Choice, event: ToolCallStart) -> dict[str, Any]:
        choice.num_calls += 1
        if self._options.legacy:
            return {"function_call": {"name": event.name, "arguments": ""}}
        if event.custom:
            choice.custom.add(event.index)
            call: dict[str, Any] = {"type": "custom", "custom": {"name": event.name, "input": ""}}
        else:
            call = {"type": "function", "function": {"name": event.name, "arguments": ""}}
        return {"tool_calls": [{"index": event.index, "id": event.id} | call]}

    def _call_text(self, choice: _Choice, index: int, text: str) -> dict[str, Any]:
        if self._options.legacy:
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
        if self._body.return_token_ids or self._body.return_prompt_token_ids:
            chunk["prompt_token_ids"] = self._job.prompt_token_ids  # where SGLang puts them; vLLM's are in about_prompt
        return chunk

    def _chunk(self, choice: _Choice, delta: dict[str, Any]) -> Chunk:
        """Build a delta with the log-probabilities and ids of all tokens since the last one."""
        reasoning: dict[str, Any] = self._no_reasoning
        if choice.held_reasoning:
            reasoning = dict.fromkeys(self._options.reasoning_fields, choice.held_reasoning)
            choice.held_reasoning = ""
        chunk: Chunk = {"index": choice.index, "delta": reasoning | delta, "logprobs": None, "finish_reason": None}
        if choice.logprobs:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            watched, top = self._job.params.logprob_token_ids, self._body.top_logprobs or 0
            chunk["logprobs"] = chat_logprobs(choice.logprobs, top, self._texts, as_ids, watched)
            choice.logprobs = []
        if self._body.return_token_ids:
            chunk["token_ids"], choice.token_ids = choice.token_ids, []
        return chunk

    def _last(self, choice: _Choice, output: RequestOutput) -> list[Chunk]:
        choice.done = True
        chunks = [] if choice.begun else [self._first(choice, choice.num_calls == 0 and not choice.held_reasoning)]
        finish = finish_fields(output, self._job.params.stop_token_ids)
        if choice.num_calls and output.finish_reason in (None, FinishReason.STOP):
            finish["finish_reason"] = "function_call" if self._options.legacy else "tool_calls"
        if self._extras.wanted:
            finish |= self._extras.finish(0, self._job, output)
        if self._body.return_hidden_states:
            chunks.append(self._chunk(choice, {"hidden_states": last_vector(output)}))
        return [*chunks, self._chunk(choice, {}) | finish]

    def _count_reasoning(self, choice: _Choice, events: list[Event], num_tokens: int) -> None:
        """Count tokens of the reasoning and its tags. A token without an event is counted with the next event."""
        choice.unsure_tokens += num_tokens
        for event in events:
            if isinstance(event, ReasoningDelta):
                choice.thinking = True
                self._usage.reasoning_tokens += choice.unsure_tokens
                choice.unsure_tokens = 0
            elif choice.thinking:
                choice.thinking = False
                self._usage.reasoning_tokens += max(0, choice.unsure_tokens - num_tokens)
                choice.unsure_tokens = 0
            else:
                choice.unsure_tokens = 0


class Joined:
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
