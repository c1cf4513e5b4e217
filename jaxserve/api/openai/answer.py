"""Write the answers of /v1/chat/completions and /v1/completions, streamed or as one object.

One function makes the deltas of a choice. An unstreamed answer joins these deltas, so both forms are equal. The chat
answer comes first, then the completion answer; each has its choices, the joining of their deltas, and the answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxserve.api.generate.choice_parser import ChoiceParser
from jaxserve.api.generate.generation import Generation
from jaxserve.api.generate.planner import ChatPlan
from jaxserve.api.generate.wire import (
    ChunkWriter,
    CompletionLogprobs,
    ContentLogprobs,
    Envelope,
    ExtraFieldWriter,
    chat_logprobs,
    finish_fields,
    is_object,
    last_vector,
    prompt_logprobs,
)
from jaxserve.api.openai.task import ChatOptions, CompletionOptions
from jaxserve.api.state import ServerState
from jaxserve.api.work_pool import TokenTexts
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallStart
from jaxserve.types.step import FinishReason, TokenLogprobs

Chunk = dict[str, Any]


@dataclass
class _Choice:
    """The state of one choice."""

    index: int
    parser: ChoiceParser
    content_logprobs: ContentLogprobs
    begun: bool = False
    custom: set[int] = field(default_factory=set)  # indices of calls of custom tools
    arguments: list[str] = field(default_factory=list)  # argument texts of the last call
    held_reasoning: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # content tokens that are in no chunk yet
    token_ids: list[int] = field(default_factory=list)


class ChatChoices:
    """The choices of one conversation.

    complete: every choice has ended. A choice may end before its engine output does.
    about_prompt: vLLM's prompt fields beside the choices, set with the first chunk; otherwise empty
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
        found = self.about_prompt
        self.about_prompt = {}
        return found

    def chunks(self, output: RequestOutput) -> list[Chunk]:
        """Return the chunks for `output`: the role once, deltas, and the finish reason in a chunk of its own."""
        choice = self._choices.get(output.index)
        if choice is None:
            choice = self._begin(output)
        if output.prompt_logprobs is not None and self._awaits_prompt_logprobs:
            self._describe_prompt_tokens(output.prompt_logprobs)
        parser = choice.parser
        if parser.ended:
            return []
        events = parser.read(output)
        chunks: list[Chunk]
        # most outputs are one piece of text and nothing else
        plain = self._plain and choice.begun and not choice.held_reasoning  # nothing stands beside the text
        if plain and len(events) == 1 and type(event := events[0]) is ContentDelta and event.text:
            delta = {"content": event.text, **self._no_reasoning}
            chunks = [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]
        else:
            self._collect(choice, events, output)
            chunks = self._deltas(choice, events)
        return chunks + self._last(choice, output) if parser.ended else chunks

    def _begin(self, output: RequestOutput) -> _Choice:
        if not self._choices:
            self.about_prompt = self._describe_prompt()
        keeps_stop = self._plan.prompt.params.include_stop_str_in_output
        logprobs = ContentLogprobs(self._texts, keeps_stop=keeps_stop)
        choice = self._choices[output.index] = _Choice(output.index, self._plan.make_parser(), logprobs)
        return choice

    def _describe_prompt_tokens(self, entries: Sequence[TokenLogprobs | None]) -> None:
        """Add the prompt's log-probabilities once. If a thinking budget ended, the first output has none."""
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
        """Keep the ids and log-probabilities that the next chunk shows beside its delta."""
        if self._extra_fields.wanted:
            self._extra_fields.note(0, output)
        if self._output.logprobs is not None:
            choice.logprobs += choice.content_logprobs.take(events, output)
        if self._output.token_ids:
            choice.token_ids += output.token_ids

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
            watched = self._plan.prompt.params.extras.logprob_token_ids
            top = self._output.logprobs or 0
            chunk["logprobs"] = chat_logprobs(choice.logprobs, top, self._texts, self._output.tokens_as_ids, watched)
            choice.logprobs = []
        if self._output.token_ids:
            chunk["token_ids"] = choice.token_ids
            choice.token_ids = []
        return chunk

    def _last(self, choice: _Choice, output: RequestOutput) -> list[Chunk]:
        self._running -= 1
        self.complete = self._running == 0
        if output.finish_reason is None and not self.complete:
            self._plan.prompt.signal.abort_choice(choice.index)
        prompt, num_calls = self._plan.prompt, choice.parser.num_calls
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
    """Return whether a stop string ended the output in the arguments of a function. Such a call cannot be run."""
    if not isinstance(output.matched_stop, str) or choice.parser.num_calls - 1 in choice.custom:
        return False
    return not is_object("".join(choice.arguments))


class JoinedMessage:
    """Join the chunks of one choice into an unstreamed answer, in linear time."""

    def __init__(self, index: int) -> None:
        self._message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
        self._choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None, "token_ids": None}
        self._texts: dict[str, list[str]] = {}  # texts of the message, by key
        self._function_call: dict[str, list[str]] = {}
        # of each call: the values that are known at once, and the texts that grow
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


class ChatAnswer:
    """The answer to one conversation."""

    def __init__(self, plan: ChatPlan, options: ChatOptions, model: str, texts: TokenTexts) -> None:
        self._options = options.output
        self._model = model
        self._generation = plan.generation
        self.held_bytes = plan.generation.held_bytes
        self._choices = ChatChoices(plan, options, texts)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer."""
        envelope = Envelope(self._generation.options.request_id, "chat.completion.chunk", self._model)
        writer = ChunkWriter(envelope, self._generation.usage, self._options)
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                chunks = self._choices.chunks(output)
                if writer.continuous:
                    for event in writer.counted(chunks, len(output.token_ids), self._choices.take_about_prompt()):
                        yield event
                    chunks = []
                for chunk in chunks:
                    if self._choices.about_prompt:
                        yield writer.chunk_beside(chunk, self._choices.take_about_prompt())
                    else:
                        yield writer.chunk(chunk)
                if self._choices.complete:
                    break
        if writer.include_usage:
            yield writer.usage_chunk()

    async def whole(self) -> dict[str, Any]:
        """Return the unstreamed answer."""
        found: dict[int, JoinedMessage] = {}
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                for chunk in self._choices.chunks(output):
                    found.setdefault(chunk["index"], JoinedMessage(chunk["index"])).add(chunk)
                if self._choices.complete:
                    break
        envelope = Envelope(self._generation.options.request_id, "chat.completion", self._model)
        about_prompt = {"prompt_token_ids": None, "prompt_logprobs": None} | self._choices.about_prompt
        return (
            envelope.head()
            | about_prompt
            | {
                "choices": [found[index].result() for index in sorted(found)],
                "usage": self._generation.usage.as_dict(),
                "service_tier": "default",
                "system_fingerprint": None,
            }
        )


_ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionChoices:
    """The choices of one request, numbered prompt by prompt."""

    def __init__(
        self, generation: Generation, options: CompletionOptions, prompt_texts: list[str], state: ServerState
    ) -> None:
        self._prompts = generation.prompts
        self._options = options
        self._output = options.output
        self._prompt_texts = prompt_texts
        self._texts = state.token_texts
        self._hidden = state.engine.tokenizer.special_ids if options.hides_special else frozenset[int]()
        self._tokenizer = state.engine.tokenizer
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        extras = self._output.extras
        request_id = generation.options.request_id
        self._extra_fields = ExtraFieldWriter(extras, request_id, scoring=options.scoring)

    def delta(self, number: int, output: RequestOutput) -> dict[str, Any]:
        """Return the delta that `output` of prompt `number` adds to its choice."""
        index = number * self._options.made + output.index
        first = index not in self._begun
        self._begun.add(index)
        text = "" if self._options.scoring else output.text
        if first and self._options.echo:
            text = self._prompt_texts[number] + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self._output.logprobs is not None:
            choice["logprobs"] = self._take_logprobs(index, number, output, first)
        if output.finish_reason is not None:
            choice |= self._finish(number, output)
        return choice | self._extras(number, output, first)

    def _take_logprobs(self, index: int, number: int, output: RequestOutput, first: bool) -> dict[str, Any]:
        shown = self._output
        scoring = self._options.scoring
        prompt = self._prompts[number]
        if index not in self._logprobs:
            watched = prompt.params.extras.logprob_token_ids
            self._logprobs[index] = CompletionLogprobs(
                shown.logprobs or 0,
                self._texts,
                self._hidden,
                shown.tokens_as_ids,
                watched,
                drops_space=self._drops_space(prompt.prompt_token_ids),
                prompt_text=self._prompt_texts[number] if self._options.echo else "",
            )
        entries = [] if scoring else list(output.logprobs or ())
        token_ids = [] if scoring else output.token_ids
        if first and self._options.echo:
            entries = [*map(_without_watched, output.prompt_logprobs or ()), *entries]
            token_ids = [*prompt.prompt_token_ids, *token_ids]
        return self._logprobs[index].take(entries, token_ids)

    def _drops_space(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the choice's text lacks the space of its first token, which begins a sentencepiece text."""
        begins = self._options.echo or all(i in self._tokenizer.special_ids for i in prompt_token_ids)
        return begins and self._tokenizer.strips_first_space and self._tokenizer.decoder_kind == "byte_fallback"

    def _finish(self, number: int, output: RequestOutput) -> dict[str, Any]:
        if self._options.scoring and output.finish_reason is not FinishReason.ABORT:
            return {"finish_reason": "length", "matched_stop": None, "stop_reason": None}
        return finish_fields(output, self._prompts[number].params.stop_token_ids)

    def _extras(self, number: int, output: RequestOutput, first: bool) -> dict[str, Any]:
        shown = self._output
        prompt = self._prompts[number]
        ended = output.finish_reason is not None
        extras: dict[str, Any] = {}
        if shown.token_ids:
            extras["token_ids"] = [] if self._options.scoring else output.token_ids
        if first and shown.prompt_token_ids:
            extras["prompt_token_ids"] = prompt.prompt_token_ids
        if self._extra_fields.wanted:
            self._extra_fields.note(number, output)
            if ended:
                extras |= self._extra_fields.finish(number, prompt, output)
        if ended and shown.prompt_text:
            extras["prompt_text"] = self._prompt_texts[number]
        if ended and shown.hidden_state:
            extras["hidden_states"] = last_vector(output)
        if shown.prompt_logprobs is not None and output.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, shown.prompt_logprobs, self._texts)
        return extras


def _without_watched(entry: TokenLogprobs | None) -> TokenLogprobs | None:
    """Return the entry without the log-probabilities of requested ids, which are not shown for the prompt."""
    return msgspec.structs.replace(entry, watched=[]) if entry is not None and entry.watched else entry


class JoinedText:
    """Join the deltas of one choice, in linear time."""

    def __init__(self) -> None:
        self._choice: dict[str, Any] = {}
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[str, list[Any]] = {name: [] for name in _ARRAYS}

    def add(self, delta: dict[str, Any]) -> None:
        self._choice |= delta
        self._texts.append(delta["text"])
        self._token_ids += delta.get("token_ids", ())
        if delta["logprobs"] is not None:
            for name, entries in self._logprobs.items():
                entries += delta["logprobs"][name]

    def result(self) -> dict[str, Any]:
        joined = self._choice | {"text": "".join(self._texts)}
        if self._choice["logprobs"] is not None:
            joined["logprobs"] = self._logprobs
        if "token_ids" in self._choice:
            joined["token_ids"] = self._token_ids
        return joined


# vLLM's fields, null unless requested
_UNASKED = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}


class CompletionAnswer:
    """The answer to one request."""

    def __init__(
        self, generation: Generation, options: CompletionOptions, model: str, choices: CompletionChoices
    ) -> None:
        self._generation = generation
        self._options = options
        self.held_bytes = generation.held_bytes
        self._choices = choices
        self._envelope = Envelope(generation.options.request_id, "text_completion", model)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer."""
        writer = ChunkWriter(self._envelope, self._generation.usage, self._options.output)
        async with aclosing(self._generation.outputs()) as outputs:
            async for number, output in outputs:
                self._cut_usage()
                delta = self._choices.delta(number, output)
                if _says_something(delta):
                    yield writer.chunk(delta)
        if writer.include_usage:
            yield writer.usage_chunk()

    async def whole(self) -> dict[str, Any]:
        """Return the unstreamed answer."""
        found: dict[int, JoinedText] = {}
        scores: dict[int, list[float]] = {}
        async with aclosing(self._generation.outputs()) as outputs:
            async for number, output in outputs:
                delta = self._choices.delta(number, output)
                index = delta["index"]
                found.setdefault(index, JoinedText()).add(delta)
                scores.setdefault(index, []).extend(entry.logprob for entry in output.logprobs or ())
        self._cut_usage()
        ordered = [found[index].result() for index in sorted(found)]
        return self._envelope.head() | {
            "choices": [_UNASKED | choice for choice in self._best(ordered, scores)],
            "usage": self._generation.usage.as_dict(),
            "system_fingerprint": None,
        }

    def _cut_usage(self) -> None:
        """Leave the one token that the engine always samples out of the usage if max_tokens is 0."""
        if self._options.scoring:
            self._generation.usage.drop_output()

    def _best(self, choices: list[dict[str, Any]], scores: dict[int, list[float]]) -> list[dict[str, Any]]:
        """Return the n of best_of choices of each prompt with the highest mean log-probability, renumbered.

        A beam search returns its choices best first, so these are its first n choices.
        """
        n = self._options.num_choices
        made = self._options.made
        if made <= n:
            return choices
        kept = []
        for start in range(0, len(choices), made):
            group = choices[start : start + made]
            if not self._options.best_first:
                group.sort(key=lambda choice: -_mean(scores[choice["index"]]))
            kept += group[:n]
        return [choice | {"index": index} for index, choice in enumerate(kept)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _says_something(delta: dict[str, Any]) -> bool:
    """Return False if the token's text is held back because it is part of a character or of a stop string."""
    tokens = delta["logprobs"]["tokens"] if delta["logprobs"] is not None else delta.get("token_ids")
    about_prompt = "prompt_logprobs" in delta or "prompt_token_ids" in delta
    return bool(delta["text"] or tokens or delta["finish_reason"] or about_prompt)
