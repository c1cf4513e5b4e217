"""Running the engine for one HTTP request: one or more prompts, their outputs merged, counted and measured.

Knows RequestOutputs, not the wire.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from jaxserve.api.state import ServerState
from jaxserve.engine.output import RequestOutput
from jaxserve.engine.request import SamplingParams
from jaxserve.errors import HTTPError

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
Stream = AsyncGenerator[RequestOutput, None]
Generate = Callable[[list[int], SamplingParams, str], Stream]  # (prompt, params, name within the job)
Shape = Callable[[Generate], Stream]


@dataclass(frozen=True)
class Job:
    """One prompt for the engine. `shape`: another way to make its stream than one plain request."""

    prompt_token_ids: list[int]
    params: SamplingParams
    shape: Shape | None = None


@dataclass
class Usage:
    """Tokens of one HTTP request, as far as it has come."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "reasoning_tokens": self.reasoning_tokens,
        }


@dataclass
class Generation:
    """All the engine work behind one HTTP request. `outputs()` may be iterated once; closing it aborts."""

    state: ServerState
    request_id: str
    jobs: list[Job]
    priority: int = 0
    cache_salt: str = ""
    interval: int = 1  # tokens that an output holds at least, but for the first and the last
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        self.usage.prompt_tokens = sum(len(job.prompt_token_ids) for job in self.jobs)
        self._cached = [0] * len(self.jobs)

    def outputs(self) -> Outputs:
        """(number of the job, output) as they come. Raises what the engine raises."""
        if len(self.jobs) == 1:
            merged = self._measured(0, self.request_id)
        else:
            ids = [f"{self.request_id}.{number}" for number in range(len(self.jobs))]
            merged = merge([self._measured(number, engine_id) for number, engine_id in enumerate(ids)])
        return merged if self.interval <= 1 else _coalesce(merged, self.interval)

    async def _measured(self, number: int, engine_id: str) -> Outputs:
        """The outputs of one job. One of few functions that run for every token: keep it lean."""
        metrics, usage = self.state.metrics, self.usage
        times = metrics.latencies(self.priority)
        started = time.perf_counter()
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        stream = self._generate(self.jobs[number], engine_id)
        self.state.live.add(engine_id)
        try:
            async for output in stream:
                now = time.perf_counter()
                count = len(output.token_ids)
                if count:
                    before = last.get(output.index)
                    if before is None:
                        first[output.index] = now
                        times.first_token(now - started, output.queue_seconds, output.prefill_seconds)
                    else:
                        times.inter_token.observe((now - before) / count)
                    last[output.index] = now
                    usage.completion_tokens += count
                if output.finish_reason is not None:
                    self._finished(number, output)
                    decode = now - first.get(output.index, now)
                    times.finished(now - started, decode, output.num_prompt_tokens, output.num_output_tokens)
                yield number, output
        except HTTPError as error:
            metrics.errors.labels(error.code or error.type).inc()
            raise
        finally:
            self.state.tracing.generation(engine_id, time.perf_counter() - started, usage.as_dict())
            self.state.live.discard(engine_id)
            await stream.aclose()

    def _generate(self, job: Job, engine_id: str) -> Stream:
        def generate(prompt_token_ids: list[int], params: SamplingParams, name: str) -> Stream:
            stream: AsyncIterator[RequestOutput] = self.state.engine.generate(
                prompt_token_ids,
                params,
                request_id=f"{engine_id}.{name}" if name else engine_id,
                priority=self.priority,
                cache_salt=self.cache_salt,
                deadline=self.state.config.server.request_timeout,
            )
            return cast("Stream", stream)

        return generate(job.prompt_token_ids, job.params, "") if job.shape is None else job.shape(generate)

    def _finished(self, number: int, output: RequestOutput) -> None:
        self.state.metrics.requests.labels(str(output.finish_reason)).inc()
        self._cached[number] = max(self._cached[number], output.num_cached_tokens)
        self.usage.cached_tokens = sum(self._cached)


async def _coalesce(stream: Outputs, interval: int) -> Outputs:
    """Fewer, larger outputs. The first of each choice passes at once."""
    held: dict[tuple[int, int], RequestOutput | None] = {}
    async with aclosing(stream):
        async for number, output in stream:
            key = number, output.index
            first, before = key not in held, held.get(key)
            if before is not None:
                output = _joined(before, output)
            if first or output.finish_reason is not None or len(output.token_ids) >= interval:
                held[key] = None
                yield number, output
            else:
                held[key] = output


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    logprobs = None if second.logprobs is None else [*(first.logprobs or ()), *second.logprobs]
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        support=None if second.support is None else [*(first.support or ()), *second.support],
        hidden=None if second.hidden is None else (first.hidden or b"") + second.hidden,
        prompt_hidden=first.prompt_hidden or second.prompt_hidden,
        experts=None if second.experts is None else (first.experts or b"") + second.experts,
        prompt_experts=first.prompt_experts or second.prompt_experts,
    )


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Interleave several streams. The first error ends all; closing closes all."""
    queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def new_id(prefix: str, given: str | None = None) -> str:
    return given or f"{prefix}-{uuid.uuid4().hex}"
