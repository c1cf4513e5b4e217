"""Write the answer of /v1/responses: items, streamed as numbered events or as one object.

`ItemWriter` makes the items from the events of a choice. A `Keeper` stores the response before the client is told of
its state.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import orjson

from jaxserve.api.generate.planner import ChatPlan
from jaxserve.api.generate.wire import ContentLogprobs, admitted, chat_logprobs, is_object, next_output
from jaxserve.api.http.errors import as_http_error
from jaxserve.api.http.sse import named_event
from jaxserve.api.responses.task import ResponseOptions
from jaxserve.errors import ContextLengthError, HTTPError, QueueFullError, RequestError
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from jaxserve.types.step import FinishReason

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_PART_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_CALL_EVENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
CALL_KINDS = frozenset(_CALL_EVENTS)
ITEM_KINDS = frozenset(_PREFIXES)
_NOTHING: frozenset[str] = frozenset()


class ItemWriter:
    """Turn the events of a choice into items. One item is open at a time.

    call_names: returns the fields that name a called tool, given the name that the model knows
    encrypt: returns encrypted reasoning; None: reasoning is not encrypted
    """

    def __init__(
        self, call_names: Callable[[str], dict[str, str]], encrypt: Callable[[str], str] | None = None
    ) -> None:
        self.items: list[Json] = []  # the items that are done
        self._call_names = call_names
        self._encrypt = encrypt
        self._numbers = 0  # events so far
        self._item: Json | None = None  # the open item
        self._texts: list[str] = []  # texts of the open item
        self._logprobs: list[Json] = []  # log-probabilities of the open item
        self._is_text = False  # whether the open item is a message
        self._delta: Json = {}  # fields of every delta of the open item

    def event(self, kind: str, **fields: Any) -> Json:
        """Return an event with the next sequence number."""
        number = self._numbers
        self._numbers = number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def write(self, events: Sequence[Event], logprobs: list[Json], cut: frozenset[str] = _NOTHING) -> Iterable[Json]:
        """Return the events for `events`.

        logprobs: log-probabilities of the tokens of the text among them
        cut: kinds of item that are not complete if these events end the output in them
        """
        if len(events) == 1 and type(event := events[0]) is ContentDelta and self._is_text and not logprobs:
            return (self._text_delta(event.text),) if event.text else ()  # the common case
        return self._written(events, logprobs, cut)

    def _written(self, events: Sequence[Event], logprobs: list[Json], cut: frozenset[str]) -> Iterator[Json]:
        for event in events:
            match event:
                case ContentDelta(text):
                    if text:
                        yield from self._in_item("message")
                        event = self._text_delta(text)
                        yield self._with_logprobs(event, logprobs) if logprobs else event
                        logprobs = []
                case ReasoningDelta(text):
                    yield from self._in_item("reasoning")
                    yield self._text_delta(text)
                case ToolCallStart():
                    yield from self._start_call(event)
                case ToolCallDelta(_, text):
                    yield self._text_delta(text)
                case ToolCallEnd():
                    yield from self.close(cut if event is events[-1] else _NOTHING)

    def finish(self, cut: frozenset[str]) -> Iterator[Json]:
        """Close the open item. An answer without any item gets a message with an empty text."""
        if self._item is None and not self.items:
            yield from self._in_item("message")
        yield from self.close(cut)

    def close(self, cut: frozenset[str] = _NOTHING) -> Iterator[Json]:
        """Close the open item, if there is one. It is not complete if its kind is in `cut`."""
        item = self._item
        if item is None:
            return
        text = "".join(self._texts)
        kind = item["type"]
        is_whole = kind not in cut or (kind == "function_call" and is_object(text))
        done = self._call_done(item, text) if kind in _CALL_EVENTS else self._part_done(item, text)
        yield from done
        if kind == "reasoning" and self._encrypt is not None and (encrypted := self._encrypt(text)):
            item["encrypted_content"] = encrypted
        item["status"] = "completed" if is_whole else "incomplete"
        self.items.append(item)
        self._item = None
        self._is_text = False
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _call_done(self, item: Json, text: str) -> Iterator[Json]:
        kind, field = _CALL_EVENTS[item["type"]]
        item[field] = text
        named = {"name": item["name"]} if field == "arguments" else {}
        yield self.event(f"{kind}.done", **self._place(), **named, **{field: text})

    def _part_done(self, item: Json, text: str) -> Iterator[Json]:
        kind = _PART_EVENTS[item["type"]]
        part = self._part(item["type"], text)
        place = self._place(content_index=0)
        shown = {}
        if item["type"] == "message":
            part["logprobs"] = self._logprobs
            shown = {"logprobs": [without_bytes(entry) for entry in self._logprobs]}
        item["content"] = [part]
        yield self.event(f"{kind}.done", **place, text=text, **shown)
        yield self.event("response.content_part.done", **place, part=part)

    def _in_item(self, kind: str) -> Iterator[Json]:
        """Open an item of this kind, a message or a reasoning, unless one is open."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self.close()
        fields = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield self._open(kind, fields | {"content": []})
        place = self._place(content_index=0)
        yield self.event("response.content_part.added", **place, part=self._part(kind, ""))
        self._delta = {"type": f"{_PART_EVENTS[kind]}.delta", **place}
        if kind == "message":
            self._is_text = True
            self._delta["logprobs"] = []

    def _start_call(self, event: ToolCallStart) -> Iterator[Json]:
        yield from self.close()
        kind = "custom_tool_call" if event.custom else "function_call"
        name, field = _CALL_EVENTS[kind]
        yield self._open(kind, {"call_id": event.id, **self._call_names(event.name), field: ""})
        self._delta = {"type": f"{name}.delta", **self._place()}

    def _open(self, kind: str, fields: Json) -> Json:
        item_id = f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"
        self._item = {"type": kind, "id": item_id, **fields, "status": "in_progress"}
        self._texts = []
        self._logprobs = []
        return self.event("response.output_item.added", output_index=len(self.items), item=dict(self._item))

    def _text_delta(self, text: str) -> Json:
        self._texts.append(text)
        number = self._numbers
        self._numbers = number + 1
        return {**self._delta, "sequence_number": number, "delta": text}

    def _with_logprobs(self, event: Json, logprobs: list[Json]) -> Json:
        self._logprobs += logprobs
        return event | {"logprobs": [without_bytes(entry) for entry in logprobs]}

    def _place(self, **more: int) -> Json:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.items), **more}

    def _part(self, kind: str, text: str) -> Json:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def without_bytes(entry: Json) -> Json:
    """Return a token's log-probability as events show it."""
    shown = {"token": entry["token"], "logprob": entry["logprob"]}
    if "top_logprobs" in entry:
        shown["top_logprobs"] = [without_bytes(top) for top in entry["top_logprobs"]]
    return shown


Json = dict[str, Any]


class Keeper(Protocol):
    """Keep a response. Both methods are awaited before the event that tells the client of the response's state."""

    async def begin(self) -> None: ...

    async def finish(self, response: Json, output_items: list[Json]) -> None:
        """Store the response that has ended. Called once, unless the answer is not read to its end."""


class NoKeeper:
    """Keep nothing."""

    async def begin(self) -> None: ...

    async def finish(self, response: Json, output_items: list[Json]) -> None: ...


class ResponsesAnswer:
    """The answer to one conversation.

    owner: name of the caller's key, to which encrypted reasoning is bound
    """

    def __init__(
        self, plan: ChatPlan, options: ResponseOptions, model: str, owner: str, keeper: Keeper | None = None
    ) -> None:
        state = plan.generation.state
        self._plan = plan
        self._options = options
        self._model = model
        self._keeper = keeper or NoKeeper()
        self._parser = plan.make_parser()
        self._cached = 0
        self._entries = ContentLogprobs(plan.generation.state.token_texts)
        encrypt = (lambda text: state.encryption.encrypt(text, model, owner)) if options.encrypts else None
        self._writer = ItemWriter(options.tools.call_names, encrypt)
        self.held_bytes = plan.generation.held_bytes

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer as server-sent events."""
        async with aclosing(self.events()) as events:
            async for event in events:
                yield named_event(event["type"], orjson.dumps(event))

    def queued(self) -> Json:
        """Return the response object before the response begins."""
        return self._response("queued")

    async def whole(self) -> Json:
        """Return the response object of the unstreamed answer. Raises the engine's errors."""
        last: Json = {}
        async with aclosing(self.events(tells_errors=False)) as events:
            async for event in events:
                last = event
        return last["response"]

    async def events(self, *, tells_errors: bool = True) -> AsyncGenerator[Json, None]:
        """Yield the events of the answer. The last event has the final response.

        The first event is sent once the request has been accepted. An engine error before it is raised. A later error
        is an event, unless `tells_errors` is false.
        """
        has_begun = False
        try:
            async with aclosing(self._plan.generation.outputs()) as outputs, admitted(outputs) as first:
                await self._keeper.begin()
                begun = self._response("in_progress")
                has_begun = tells_errors
                for kind in ("response.created", "response.in_progress"):
                    yield self._writer.event(kind, response=begun)
                output = await first
                while output is not None:
                    for event in self._read(output):
                        yield event
                    if self._parser.ended:
                        break
                    output = await next_output(outputs)
            yield await self._completed(output)
        except Exception as error:
            if not has_begun:
                raise
            for event in await self._failed(as_http_error(error)):
                yield event

    def _read(self, output: RequestOutput) -> Iterable[Json]:
        if output.num_cached_tokens > self._cached:
            self._cached = output.num_cached_tokens
        events = self._parser.read(output)
        if self._options.only_warms:
            self._plan.generation.usage.drop_output()
            return ()
        logprobs = self._logprobs(events, output) if self._options.logprobs is not None else []
        if not self._parser.ended:
            return self._writer.write(events, logprobs)
        cut = _cut_by(output)
        return itertools.chain(self._writer.write(events, logprobs, cut), self._writer.finish(cut))

    def _logprobs(self, events: Sequence[Event], output: RequestOutput) -> list[Json]:
        """Return the log-probabilities of the tokens of the answer's text among `events`."""
        entries = self._entries.take(events, output)
        texts = self._plan.generation.state.token_texts
        return chat_logprobs(entries, self._options.logprobs or 0, texts, as_ids=False)["content"] if entries else []

    async def _completed(self, last: RequestOutput | None) -> Json:
        ends = (None, FinishReason.STOP, *((FinishReason.LENGTH,) if self._options.only_warms else ()))
        is_whole = last is None or last.finish_reason in ends
        status = "completed" if is_whole else "incomplete"
        reason = None if is_whole else {"reason": "max_output_tokens"}
        response = self._response(status) | {"incomplete_details": reason, "usage": self._usage()}
        if is_whole:
            response["completed_at"] = int(time.time())
        await self._keeper.finish(response, self._writer.items)
        return self._writer.event(f"response.{status}", response=response)

    async def _failed(self, error: HTTPError) -> list[Json]:
        """Return the events of an error: in both forms that clients read, and the failed response."""
        inner = error.body()["error"]
        flat = {"code": error.code or inner["type"], "message": error.message, "param": error.param}
        told = self._writer.event("error", **flat, error=inner)
        shown = {"code": _failure_code(error), "message": error.message}
        response = self._response("failed") | {"error": shown, "usage": self._usage()}
        try:
            await self._keeper.finish(response, self._writer.items)
        except HTTPError:  # the client is told of the first error
            pass
        return [told, self._writer.event("response.failed", response=response)]

    def _response(self, status: str) -> Json:
        return {
            "object": "response",
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": list(self._writer.items),
            "usage": None,
            **self._options.form,
        }

    def _usage(self) -> Json:
        usage = self._plan.generation.usage
        page = self._plan.generation.state.engine.info.page_size
        read = max(self._cached, usage.cached_tokens)
        written = max(0, usage.prompt_tokens // page * page - read)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _cut_by(output: RequestOutput) -> frozenset[str]:
    """Return the kinds of item that are not complete if `output` ends in them.

    A stop string ends a text, but cuts a call.
    """
    if output.finish_reason is None:  # the choice ended before the output, at the end of a call
        return frozenset()
    if output.finish_reason is not FinishReason.STOP:
        return ITEM_KINDS
    return CALL_KINDS if isinstance(output.matched_stop, str) else frozenset()


def _failure_code(error: HTTPError) -> str:
    """Return the code that clients of Responses act on."""
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    if isinstance(error, QueueFullError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"
