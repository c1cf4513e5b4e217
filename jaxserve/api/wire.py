"""Pieces of answers that several routes share: JSON responses, chunk envelopes, finish reasons."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response

from jaxserve.api.generation import Usage
from jaxserve.api.protocol.common import SamplingFields
from jaxserve.engine.output import RequestOutput
from jaxserve.errors import InvalidValueError


def json_response(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


@dataclass(frozen=True)
class Envelope:
    """What all chunks of an answer have in common. The constant part is serialized once."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


class ChunkWriter:
    """Server-sent events of one answer."""

    def __init__(self, envelope: Envelope, usage: Usage, body: SamplingFields) -> None:
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._usage = usage
        self._head = b"data: " + orjson.dumps(envelope.head())[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def chunk(self, choice: Mapping[str, Any]) -> bytes:
        return self._head + orjson.dumps(choice) + (self._usage_tail() if self._continuous else self._tail)

    def chunk_beside(self, choice: Mapping[str, Any], others: Mapping[str, Any]) -> bytes:
        """A chunk with fields beside its choices."""
        return self.chunk(choice).replace(b"{", b"{" + orjson.dumps(others)[1:-1] + b",", 1)

    def usage_chunk(self) -> bytes:
        return self._head + self._usage_tail()

    def _usage_tail(self) -> bytes:
        return b'],"usage":%b}\n\n' % orjson.dumps(self._usage.as_dict())


def check_stream_options(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidValueError("stream_options is only allowed with stream: true.", param="stream_options")


def finish_fields(output: RequestOutput, stop_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """finish_reason, SGLang's matched_stop and vLLM's stop_reason (null for the end of the sequence itself)."""
    matched = output.matched_stop
    named = isinstance(matched, str) or matched in stop_token_ids
    return {
        "finish_reason": str(output.finish_reason),
        "matched_stop": matched,
        "stop_reason": matched if named else None,
    }
