"""The load generator: sends a workload to any OpenAI-compatible server and records the time of every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import orjson

from jaxserve.bench.workload import LoadRequest
from jaxserve.errors import ConfigError

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")  # of a chat's chunk
_NO_STREAM = (ValueError, LookupError, TypeError, AttributeError)  # of reading events that have another form
READ_TIMEOUT = 600.0  # seconds without a byte


@dataclass(slots=True)
class Timing:
    """The times of one request, in seconds since the start of the run."""

    sent: float
    token_times: list[float] = field(default_factory=list)  # of each chunk with text or tokens, at least one
    output_tokens: int = 0
    prompt_tokens: int = 0
    ended: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2 or not self.token_times:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The server under load."""

    base_url: str  # without /v1
    model: str
    api_key: str | None = None
    chat: bool = False
    ignore_eos: bool = True
    token_ids: bool = False  # request token ids, so that a token without text is timed too


def root_url(text: str) -> str:
    """Return a server's address without the /v1 that OpenAI's clients need."""
    return text.rstrip("/").removesuffix("/v1")


async def find_model(base_url: str, api_key: str | None = None) -> str:
    """Return the first model that the server serves. Raises ConfigError if no server answers."""
    async with httpx2.AsyncClient(headers=_headers(api_key)) as client:
        try:
            reply = await client.get(f"{base_url}/v1/models")
            return str(reply.json()["data"][0]["id"])
        except (httpx2.HTTPError, httpx2.InvalidURL, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"no OpenAI-compatible server at {base_url}: {error}") from None


async def run_load(
    target: LoadTarget,
    requests: list[LoadRequest],
    *,
    concurrency: int | None,
    on_done: Callable[[Timing], None] = lambda timing: None,
) -> tuple[list[Timing], float]:
    """Send all requests, at most `concurrency` at once and none before its time.

    Returns the timings and the seconds in total.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    gate = asyncio.Semaphore(concurrency or len(requests) or 1)

    async with httpx2.AsyncClient(limits=limits, timeout=READ_TIMEOUT, headers=_headers(target.api_key)) as client:
        start = time.perf_counter()  # the client reads the certificates of this machine before, for 0.05 s and more

        async def one(request: LoadRequest) -> Timing:
            if request.at is not None:
                await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - start)))
            async with gate:
                timing = await _send(client, target, request, start)
            on_done(timing)
            return timing

        timings = await asyncio.gather(*(one(request) for request in requests))
        seconds = time.perf_counter() - start
    return list(timings), seconds


async def _send(client: httpx2.AsyncClient, target: LoadTarget, request: LoadRequest, start: float) -> Timing:
    timing = Timing(sent=time.perf_counter() - start)
    route = "/v1/chat/completions" if target.chat else "/v1/completions"
    try:
        async with client.stream("POST", target.base_url + route, json=_body(target, request)) as reply:
            if reply.status_code != 200:
                timing.error = f"{reply.status_code}: {(await reply.aread())[:200]!r}"
            else:
                await _read_events(reply, timing, start)
    except (httpx2.HTTPError, httpx2.InvalidURL, *_NO_STREAM) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.ended = time.perf_counter() - start
    if timing.error is None and not timing.token_times:
        timing.error = "no token arrived"
    return timing


async def _read_events(reply: httpx2.Response, timing: Timing, start: float) -> None:
    counted = ended = False
    async for line in reply.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            ended = True
            continue
        now = time.perf_counter() - start
        event = orjson.loads(line[6:])
        if "error" in event:
            timing.error = str(event["error"].get("message"))
        timing.token_times += [now for choice in event.get("choices", ()) if _is_timed(choice, timing)]
        if usage := event.get("usage"):
            counted = True
            timing.output_tokens = usage["completion_tokens"]
            timing.prompt_tokens = usage["prompt_tokens"]
    if timing.error is None and not (ended and counted):
        timing.error = "the stream has no usage" if ended else "the stream ended before its end was sent"


def _is_timed(choice: dict[str, Any], timing: Timing) -> bool:
    """Return whether a chunk brings tokens. One that only ends the answer does if none did: its token has no text."""
    brings = _has_text(choice) or bool(choice.get("token_ids"))
    return brings or (bool(choice.get("finish_reason")) and not timing.token_times)


def _has_text(choice: dict[str, Any]) -> bool:
    """Return whether a chunk has text of the model: of the answer, of the reasoning before it, or of a call."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(name) for name in _TEXTS))


def _body(target: LoadTarget, request: LoadRequest) -> dict[str, object]:
    body: dict[str, object] = {
        "model": target.model,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.token_ids:
        body["return_token_ids"] = True
    if target.chat:
        return body | {"messages": [{"role": "user", "content": request.prompt}]}
    return body | {"prompt": request.prompt}


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
