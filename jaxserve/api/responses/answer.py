"""Write the answer of /v1/responses: items, streamed as numbered events or whole."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import orjson

from jaxserve.api.errors.responses import as_http_error
from jaxserve.api.generate.planner import ChatPlan
from jaxserve.api.http.sse import named_event
from jaxserve.api.respond.admission import admitted, next_output
from jaxserve.api.respond.logprobs import chat_logprobs
from jaxserve.api.responses.output_items import CALL_KINDS, ITEM_KINDS, ItemWriter
from jaxserve.api.responses.task import ResponseOptions
from jaxserve.errors import ContextLengthError, HTTPError, QueueFullError, RequestError
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, ToolCallStart
from jaxserve.types.step import FinishReason, TokenLogprobs

Json = dict[str, Any]


class Keeper(Protocol):
    """Keeps a response. Both methods are awaited before the event that tells the client of it."""

    async def begin(self) -> None: ...

    async def finish(self, response: Json, output_items: list[Json]) -> None:
        """Called once, unless the answer is not read to its end."""


class NoKeeper:
    """Keeps nothing."""

    async def begin(self) -> None: ...

    async def finish(self, response: Json, output_items: list[Json]) -> None: ...


class ResponsesAnswer:
    """The answer to one conversation.

    owner: name of the caller's key, to which sealed reasoning is bound
    """

    def __init__(
        self, plan: ChatPlan, options: ResponseOptions, model: str, owner: str, keeper: Keeper | None = None
    ) -> None:
        state = plan.generation.state
        self._plan = plan
        self._options = options
        self._model = model
        self._keeper = keeper or NoKeeper()
        self._turn = plan.make_turn()
        self._cached = 0
        self._entries: list[TokenLogprobs] = []  # of tokens that no delta has carried yet
        self._after_text = True  # the last event was of the answer's text, or there was none
        seal = (lambda text: state.seal.seal(text, model, owner)) if options.seals else None
        self._writer = ItemWriter(options.tools.call_names, seal)
        self.held_bytes = plan.generation.held_bytes

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer as server-sent events."""
        async with aclosing(self.events()) as events:
            async for event in events:
                yield named_event(event["type"], orjson.dumps(event))

    def queued(self) -> Json:
        """Return the response that has not begun."""
        return self._response("queued")

    async def whole(self) -> Json:
        """Return the response of the unstreamed answer. Raises what the engine raises."""
        last: Json = {}
        async with aclosing(self.events(tells_errors=False)) as events:
            async for event in events:
                last = event
        return last["response"]

    async def events(self, *, tells_errors: bool = True) -> AsyncGenerator[Json, None]:
        """Yield the events of the answer; the last one has the final response.

        The first is sent once the request has been accepted. Raises what the engine raises before that. A later error
        is an event, unless `tells_errors` is false.
        """
        has_begun = False
        try:
            async with aclosing(self._plan.generation.outputs()) as outputs, admitted(outputs) as first:
                await self._keeper.begin()
                begun, has_begun = self._response("in_progress"), tells_errors
                for kind in ("response.created", "response.in_progress"):
                    yield self._writer.event(kind, response=begun)
                output = await first
                while output is not None:
                    for event in self._read(output):
                        yield event
                    if self._turn.ended:
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
        events = self._turn.read(output)
        logprobs = self._logprobs(events, output) if self._options.logprobs is not None else []
        if not self._turn.ended:
            return self._writer.write(events, logprobs)
        cut = _cut_by(output)
        return itertools.chain(self._writer.write(events, logprobs, cut), self._writer.finish(cut))

    def _logprobs(self, events: Sequence[Event], output: RequestOutput) -> list[Json]:
        """Return the log-probabilities of the tokens of the answer's text among `events`."""
        entries = [*self._entries, *(output.logprobs or ())]
        for event in events:
            if isinstance(event, ContentDelta):
                if not self._after_text:  # tokens before this output belong to the reasoning, its tags or a call
                    entries = list(output.logprobs or ())
                self._after_text = True
            elif isinstance(event, ReasoningDelta | ToolCallStart):
                self._after_text = False
        shows = any(isinstance(event, ContentDelta) for event in events)
        self._entries = entries if self._after_text and not shows else []
        if not shows:
            return []
        state, top = self._plan.generation.state, self._options.logprobs or 0
        return chat_logprobs(entries, top, state.token_texts, as_ids=False)["content"]

    async def _completed(self, last: RequestOutput | None) -> Json:
        is_whole = last is None or last.finish_reason in (None, FinishReason.STOP)
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
        usage, page = self._plan.generation.usage, self._plan.generation.state.engine.info.page_size
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
    """Return the kinds of item that are not whole if `output` ends in them.

    A stop string ends a text, but cuts a call.
    """
    if output.finish_reason is None:  # the turn ended before the output, at the end of a call
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
