"""Parts of answers that several routes share: JSON responses, chunk envelopes, finish reasons."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response

from jaxserve.api.generate.generation import Usage
from jaxserve.api.tasks.task import OutputOptions
from jaxserve.text.detokenizer import RequestOutput


def json_response(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def json_answer(content: Any) -> Response:
    """Encode an answer choice by choice, yielding to the event loop in between."""
    choices = content if isinstance(content, list) else content.get("choices", ())
    if len(choices) < 2:
        return json_response(content)
    written = []
    for choice in choices:
        written.append(orjson.Fragment(orjson.dumps(choice)))
        await asyncio.sleep(0)
    return json_response(written if isinstance(content, list) else content | {"choices": written})


def is_object(text: str) -> bool:
    """Return whether the arguments of a call are a whole JSON object. The token limit or a stop string may cut them,
    also before their first character."""
    try:
        return isinstance(json.loads(text, parse_constant=int), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True)
class Envelope:
    """The fields that all chunks of an answer share, encoded once."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


class ChunkWriter:
    """Write the server-sent events of one answer."""

    def __init__(self, envelope: Envelope, usage: Usage, options: OutputOptions) -> None:
        self.include_usage = options.include_usage
        self.continuous = options.continuous_usage
        self._usage = usage
        self._head = b"data: " + orjson.dumps(envelope.head())[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def chunk(self, choice: Mapping[str, Any], uncounted: int = 0) -> bytes:
        """Write a chunk. uncounted: tokens to leave out of its usage."""
        return self._head + orjson.dumps(choice) + (self._usage_tail(uncounted) if self.continuous else self._tail)

    def chunk_beside(self, choice: Mapping[str, Any], others: Mapping[str, Any], uncounted: int = 0) -> bytes:
        """Write a chunk with fields beside its choices."""
        return self.chunk(choice, uncounted).replace(b"{", b"{" + orjson.dumps(others)[1:-1] + b",", 1)

    def counted(self, chunks: list[dict[str, Any]], num_tokens: int, others: Mapping[str, Any]) -> Iterator[bytes]:
        """Write the chunks of one output, the last of which counts its tokens. `others` are fields of the first chunk.

        The finish reason is sent with the last delta, because clients treat a chunk that counts no more tokens as an
        error.
        """
        if len(chunks) > 1 and chunks[-1]["finish_reason"] is not None and "role" not in chunks[-2]["delta"]:
            delta = {name: value for name, value in chunks[-2].items() if name != "finish_reason"}
            chunks = [*chunks[:-2], chunks[-1] | delta]
        for place, chunk in enumerate(chunks):
            uncounted = 0 if place == len(chunks) - 1 else num_tokens
            yield self.chunk_beside(chunk, others, uncounted) if others and not place else self.chunk(chunk, uncounted)

    def usage_chunk(self) -> bytes:
        return self._head + self._usage_tail()

    def _usage_tail(self, uncounted: int = 0) -> bytes:
        return b'],"usage":%b}\n\n' % orjson.dumps(self._usage.as_dict(uncounted))


def finish_fields(output: RequestOutput, stop_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Return finish_reason, SGLang's matched_stop, and vLLM's stop_reason.

    stop_reason is the stop text or the one of `stop_token_ids` that ended the output, else null.
    """
    matched = output.matched_stop
    named = isinstance(matched, str) or matched in stop_token_ids
    return {
        "finish_reason": str(output.finish_reason),
        "matched_stop": matched,
        "stop_reason": matched if named else None,
    }
