"""Write the answers of Ollama's /api/chat and /api/generate: one JSON object a line, or one object.

Durations are in nanoseconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from jaxserve.api.generate.choice_parser import ChoiceParser
from jaxserve.api.generate.generation import Generation
from jaxserve.api.generate.wire import ContentLogprobs, chat_logprobs, is_object
from jaxserve.api.ollama.task import OllamaOutput
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from jaxserve.types.step import FinishReason

Json = dict[str, Any]
Kind = Literal["chat", "generate"]


def timestamp(seconds: float | None = None) -> str:
    """Return a time, by default now, as RFC 3339 in UTC. seconds: since the epoch"""
    now = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return now.isoformat().replace("+00:00", "Z")


def loaded(kind: Kind, model: str, *, unload: bool) -> Json:
    """Return the answer to a request without a prompt, which clients send to load a model or to release it."""
    reason = "unload" if unload else "load"
    return _Line(kind, model).of("") | {"done": True, "done_reason": reason}


@dataclass(frozen=True)
class _Line:
    kind: Kind
    model: str

    def of(self, text: str, **others: Any) -> Json:
        line: Json = {"model": self.model, "created_at": timestamp()}
        if self.kind == "generate":
            return line | {"response": text} | others | {"done": False}
        return line | {"message": {"role": "assistant", "content": text} | others, "done": False}


@dataclass
class _Times:
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    prefill_seconds: float = 0.0

    def note(self, output: RequestOutput) -> None:
        if self.first is None and output.token_ids:
            self.first = time.perf_counter()
            self.prefill_seconds = output.prefill_seconds

    def as_dict(self, prompt_tokens: int, output_tokens: int) -> Json:
        """Return Ollama's fields of usage, with durations in nanoseconds."""
        now = time.perf_counter()
        return {
            "total_duration": nanoseconds(now - self.started),
            "load_duration": 0,
            "prompt_eval_count": prompt_tokens,
            "prompt_eval_duration": nanoseconds(self.prefill_seconds),
            "eval_count": output_tokens,
            "eval_duration": nanoseconds(now - (self.first or now)),
        }


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class OllamaAnswer:
    """The answer to one request. parser: reads the output; None: the output is plain text"""

    def __init__(
        self, kind: Kind, generation: Generation, parser: ChoiceParser | None, options: OllamaOutput, model: str
    ) -> None:
        self._line = _Line(kind, model)
        self._generation = generation
        self._parser = parser
        self._options = options
        self._logprobs = ContentLogprobs(generation.state.token_texts)
        self._times = _Times()
        self._arguments: list[str] = []
        self._call = ToolCallStart(0, "", "")
        self._reason = "stop"
        self.held_bytes = generation.held_bytes

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the answer."""
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                yield orjson.dumps(line) + b"\n"

    async def whole(self) -> Json:
        """Return the answer as one object."""
        texts: dict[str, list[str]] = {}
        calls: list[Json] = []
        logprobs: list[Json] = []
        last: Json = {}
        async for last in self._lines():
            part = last.get("message", last)
            for name in ("content", "response", "thinking"):
                if name in part:
                    texts.setdefault(name, []).append(part[name])
            calls += part.get("tool_calls", ())
            logprobs += last.get("logprobs", ())
        found: Json = {name: "".join(pieces) for name, pieces in texts.items()}
        found |= {"tool_calls": calls} if calls else {}
        found = found if "response" in last else {"message": last["message"] | found}
        return last | found | ({"logprobs": logprobs} if logprobs else {})

    async def _lines(self) -> AsyncGenerator[Json, None]:
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                self._times.note(output)
                for line in self._written(output):
                    yield line
                if self._parser is not None and self._parser.ended:
                    break
        usage = self._generation.usage
        counts = self._times.as_dict(usage.prompt_tokens, usage.completion_tokens)
        yield self._line.of("") | {"done": True, "done_reason": self._reason} | counts

    def _written(self, output: RequestOutput) -> Iterator[Json]:
        """Yield the lines for an output. The log-probabilities of its text stand on the first with text."""
        if output.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT):
            self._reason = "length"
        events = [ContentDelta(output.text)] if self._parser is None else self._parser.read(output)
        lines = [line for event in events if (line := self._write(event)) is not None]
        if self._options.logprobs is not None and (entries := self._logprobs.take(events, output)):
            shown = chat_logprobs(entries, self._options.logprobs, self._generation.state.token_texts, as_ids=False)
            parts = [(line, line.get("message", line)) for line in lines]
            with_text = next(line for line, part in parts if part.get("content") or part.get("response"))
            with_text["logprobs"] = shown["content"]
        yield from lines

    def _write(self, event: Event) -> Json | None:
        """Return the line for an event; None if it needs none yet. A call is written whole at its end.

        Ollama's form has no place for arguments that are not an object, for example of a call that was cut. Such a call
        becomes text.
        """
        match event:
            case ContentDelta(text):
                return self._line.of(text) if text else None
            case ReasoningDelta(text):
                return self._line.of("", thinking=text)
            case ToolCallStart():
                self._call = event
                self._arguments = []
            case ToolCallDelta(_, text):
                self._arguments.append(text)
            case ToolCallEnd(index):
                arguments = "".join(self._arguments)
                if not is_object(arguments):
                    return self._line.of(_as_text(self._call.name, arguments))
                function = {"index": index, "name": self._call.name, "arguments": orjson.Fragment(arguments)}
                return self._line.of("", tool_calls=[{"id": self._call.id, "function": function}])
        return None


def _as_text(name: str, arguments: str) -> str:
    """Return a call whose arguments are not an object, as far as the model wrote it."""
    return f'{{"name": {json.dumps(name)}' + (f', "arguments": {arguments}' if arguments else "")
