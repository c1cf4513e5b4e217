"""Write the answer of /v1/messages: content blocks, streamed as named events or as one object."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import orjson

from jaxserve.api.anthropic.task import MessageOptions
from jaxserve.api.generate.planner import ChatPlan
from jaxserve.api.generate.wire import admitted, is_object, next_output
from jaxserve.api.http.sse import named_event
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from jaxserve.types.step import FinishReason

Json = dict[str, Any]


class BlockWriter:
    """Turn the events of a choice into Anthropic's block events. One block is open at a time."""

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._index = -1
        self._open = ""  # type of the open block
        self._arguments: list[str] = []  # arguments of the open call
        self.last_call_is_cut = False
        self._thinking = hashlib.sha256()

    def write(self, events: list[Event]) -> Iterator[Json]:
        """Yield the block events for `events`."""
        for event in events:
            match event:
                case ContentDelta(text):
                    if text:
                        yield from self._in_block("text", {"text": ""})
                        yield self._delta({"type": "text_delta", "text": text})
                case ReasoningDelta(text):
                    yield from self._in_block("thinking", {"thinking": "", "signature": ""})
                    self._thinking.update(text.encode())
                    if not self._hides_thinking:
                        yield self._delta({"type": "thinking_delta", "thinking": text})
                case ToolCallStart():
                    yield from self.close()
                    use = {"id": tool_id(event.id), "name": event.name, "input": {}}
                    yield from self._in_block("tool_use", use)
                case ToolCallDelta(_, text):
                    self._arguments.append(text)
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case ToolCallEnd():
                    yield from self.close()

    def finish(self) -> Iterator[Json]:
        """Close the open block. An answer without any block gets an empty one with text."""
        if self._index < 0:
            yield from self._in_block("text", {"text": ""})
        yield from self.close()

    def close(self) -> Iterator[Json]:
        """Close the open block, if there is one. A thinking block gets a signature."""
        if not self._open:
            return
        if self._open == "thinking":
            signature = base64.b64encode(self._thinking.digest()).decode()
            yield self._delta({"type": "signature_delta", "signature": signature})
            self._thinking = hashlib.sha256()
        if self._open == "tool_use":
            self.last_call_is_cut = not is_object("".join(self._arguments))
            self._arguments = []
        self._open = ""
        yield {"type": "content_block_stop", "index": self._index}

    def _in_block(self, kind: str, fields: Json) -> Iterator[Json]:
        if self._open == kind:
            return
        yield from self.close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind} | fields}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def tool_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")


def _input(arguments: str) -> Any:
    """Return a call's input, which must be an object. Other text is wrapped as in Anthropic's documentation."""
    return orjson.Fragment(arguments) if is_object(arguments) else {"INVALID_JSON": arguments}


class JoinedBlocks:
    """Join block events into the content of an unstreamed answer, in linear time."""

    def __init__(self) -> None:
        self._blocks: list[Json] = []
        self._texts: dict[str, list[str]] = {}

    def add(self, event: Json) -> None:
        """Append a block event."""
        if event["type"] == "content_block_start":
            self._blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            name, text = list(event["delta"].items())[1]
            self._texts.setdefault(name, []).append(text)
        else:
            self._settle(self._blocks[-1])

    def _settle(self, block: Json) -> None:
        for name, parts in self._texts.items():
            text: Any = "".join(parts)
            if name == "partial_json":
                name = "input"
                text = _input(text)
            block[name] = text
        self._texts = {}

    def content(self) -> list[Json]:
        return self._blocks


Keep = Callable[[str, list[Json]], Awaitable[None]]


class MessagesAnswer:
    """The answer to one conversation.

    keep: called with the id and the content of the whole answer before its end is sent to the client
    """

    def __init__(self, plan: ChatPlan, options: MessageOptions, model: str, keep: Keep | None = None) -> None:
        self._plan = plan
        self._keep = keep
        self._options = options
        self._model = model
        self._parser = plan.make_parser()
        self._blocks = BlockWriter(hides_thinking=options.hides_thinking)
        self._cached: int | None = None  # cached tokens of the prompt; the first output brings their number
        self.held_bytes = plan.generation.held_bytes

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the named events of the answer. The first is sent once the request has been accepted."""
        joined = JoinedBlocks()
        async with aclosing(self._plan.generation.outputs()) as outputs, admitted(outputs) as first:
            if first.done():
                self._note(first.result())
            yield self._start()
            output = await first
            self._note(output)
            while output is not None:
                for event in self._read(output):
                    if self._keep is not None:
                        joined.add(event)
                    yield named_event(event["type"], orjson.dumps(event))
                if self._parser.ended:
                    break
                output = await next_output(outputs)
        if self._keep is not None:
            await self._keep(self._plan.generation.options.request_id, joined.content())
        ending = self._ending(output)
        yield named_event(
            "message_delta", orjson.dumps({"type": "message_delta", "delta": ending, "usage": self._usage()})
        )
        yield named_event("message_stop", b'{"type":"message_stop"}')

    async def whole(self) -> Json:
        """Return the unstreamed answer."""
        joined = JoinedBlocks()
        last = None
        async with aclosing(self._plan.generation.outputs()) as outputs:
            async for _, output in outputs:
                self._note(output)
                last = output
                for event in self._read(output):
                    joined.add(event)
                if self._parser.ended:
                    break
        if self._keep is not None:
            await self._keep(self._plan.generation.options.request_id, joined.content())
        return self._message(joined.content()) | self._ending(last) | {"usage": self._usage()}

    def _read(self, output: RequestOutput) -> Iterator[Json]:
        events = self._parser.read(output)
        if self._options.max_tokens == 0:
            self._plan.generation.usage.drop_output()
            return
        yield from self._blocks.write(events)
        if self._parser.ended:
            yield from self._blocks.finish()

    def _note(self, output: RequestOutput | None) -> None:
        if output is not None:
            self._cached = max(self._cached or 0, output.num_cached_tokens)

    def _start(self) -> bytes:
        usage = self._usage() | {"output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return named_event("message_start", orjson.dumps({"type": "message_start", "message": message}))

    def _message(self, content: list[Json]) -> Json:
        request_id = self._plan.generation.options.request_id
        return {"id": request_id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _usage(self) -> Json:
        """Count the prompt in three parts: read from the prefix cache, written to it as full pages, the rest.

        The rest is the whole prompt until the first output says how much was read. It is never 0: Claude Code keeps the
        number of message_start if message_delta has a 0, and would count a part twice.
        """
        usage = self._plan.generation.usage
        page = self._plan.generation.state.engine.info.page_size
        read = written = 0
        if self._cached is not None:
            read = max(self._cached, usage.cached_tokens)
            written = max(0, (usage.prompt_tokens - 1) // page * page - read)
        return {
            "input_tokens": usage.prompt_tokens - read - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }

    def _ending(self, last: RequestOutput | None) -> Json:
        reason = last.finish_reason if last is not None else None
        matched = last.matched_stop if last is not None else None
        if self._options.max_tokens == 0:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if reason is FinishReason.LENGTH:
            limited = self._plan.prompt.params.max_tokens or 0
            word = "max_tokens" if self._options.max_tokens <= limited else "model_context_window_exceeded"
            return {"stop_reason": word, "stop_sequence": None}
        if reason is FinishReason.ABORT:  # the answer is not complete, and calls in it may be cut
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._parser.num_calls and not (isinstance(matched, str) and self._blocks.last_call_is_cut):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": "end_turn", "stop_sequence": None}
