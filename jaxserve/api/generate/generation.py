"""Run the engine for one HTTP request: send its prompts, and merge, count and time their outputs.

This module handles RequestOutputs and knows no wire format.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from weakref import WeakSet

import msgspec

from jaxserve.api.generate.task import RequestOptions
from jaxserve.api.keys import DEFAULT_CALLER, Caller, KeyUsage
from jaxserve.api.state import ServerState
from jaxserve.client.async_engine import AbortSignal
from jaxserve.client.sequences import OutputQueue
from jaxserve.errors import ConflictError, HTTPError, InvalidValueError
from jaxserve.log import current_record
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.extras import TokenExtras
from jaxserve.types.messages import EngineInfo
from jaxserve.types.picture import Picture
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import joined_versions

MAX_CHOICE_TOKENS = 2**20  # prompt tokens of all choices of a request: 2,048 texts of 512
CONTEXTS_A_REQUEST = 32  # or this multiple of the context length, if that is more
BEGUN_AT_ONCE = 16  # streams of a request that begin at once; beginning one takes up to 0.1 ms
MAX_MERGED = 64  # outputs between the streams and their reader; further ones wait where they are counted

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
Stream = AsyncGenerator[RequestOutput, None]
Generate = Callable[[list[int], SamplingParams], Stream]  # (prompt, params)
RunMode = Callable[[Generate], Stream]


@dataclass(frozen=True)
class PromptTask:
    """One prompt for the engine.

    run: makes the stream of outputs; None: the prompt is one plain engine request
    signal: aborts all engine requests of the prompt
    request_id: the prompt's own id; empty: the id of the HTTP request
    pictures: of the prompt, for the engine. held: refers to them while the prompt may run, so that their memory counts
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    run: RunMode | None = None
    signal: AbortSignal = field(default_factory=AbortSignal)
    request_id: str = ""
    pictures: tuple[Picture, ...] = ()
    held: Sequence[object] = ()


@dataclass
class Usage:
    """Tokens of one HTTP request so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0  # drafts that became completion tokens
    rejected_tokens: int = 0  # drafts that did not

    def drop_output(self) -> None:
        """Leave out the one token that the engine samples for a request without output."""
        self.completion_tokens = self.reasoning_tokens = 0

    def as_dict(self, uncounted: int = 0) -> dict[str, Any]:
        """Build OpenAI's usage object. uncounted: completion tokens to leave out."""
        completion_tokens = self.completion_tokens - uncounted
        details = {"reasoning_tokens": self.reasoning_tokens}
        if self.accepted_tokens or self.rejected_tokens:
            details["accepted_prediction_tokens"] = self.accepted_tokens
            details["rejected_prediction_tokens"] = self.rejected_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": details,
            "reasoning_tokens": self.reasoning_tokens,
        }


@dataclass
class Generation:
    """All engine work of one HTTP request. `outputs()` may be iterated once; closing it aborts.

    at_once: most prompts that are in the engine at a time, which leaves room for other requests; None: all
    """

    state: ServerState
    options: RequestOptions
    prompts: list[PromptTask]
    caller: Caller = DEFAULT_CALLER
    usage: Usage = field(default_factory=Usage)
    at_once: int | None = None

    def __post_init__(self) -> None:
        self._num_sequences = sum(each.params.n for each in self.prompts)
        self._check_size()
        self.usage.prompt_tokens = sum(len(each.prompt_token_ids) for each in self.prompts)
        self._cached = [0] * len(self.prompts)
        self._outboxes: WeakSet[OutputQueue] = WeakSet()
        self._key = self.state.key_usages.of(self.caller.owner)
        self._is_begun = False  # a prompt of this request was sent to the engine
        self._is_answered = False  # the engine has answered a prompt of this request
        self._weights: set[int] = set()  # numbers of the weights that made the last outputs
        self._record = current_record()
        if self._record is not None:
            self._record.note_begin(self.usage, len(self.prompts))

    def _check_size(self) -> None:
        """Raise InvalidValueError if one request asks for too much, so that waiting would not help."""
        tokens = sum(each.params.n * len(each.prompt_token_ids) for each in self.prompts)
        most = max(MAX_CHOICE_TOKENS, CONTEXTS_A_REQUEST * self.state.engine.info.max_model_len)
        if tokens > most:
            message = f"The prompts of all choices have {tokens} tokens; a request may have {most}. Send several."
            raise InvalidValueError(message, param="n" if self._num_sequences > len(self.prompts) else None)
        limit = self.state.engine.info.max_num_seqs + self.state.config.scheduler.max_queued_requests
        if self._num_sequences <= limit:
            return
        param = "n" if self._num_sequences > len(self.prompts) else None
        message = f"The request has {self._num_sequences} sequences; this server holds at most {limit} of all requests."
        raise InvalidValueError(message, param=param)

    def outputs(self) -> Outputs:
        """Yield (number of the prompt, output) as outputs arrive. Raises the engine's errors."""
        if self._key is not None and not self.caller.is_stored:
            self._check_key(self._key)
        if len(self.prompts) == 1:
            merged = self._measured(0)
        else:
            self._check_queue()
            merged = merge([self._measured(number) for number in range(len(self.prompts))], self.at_once)
        return merged if self.options.interval <= 1 else coalesce(merged, self.options.interval)

    def held_bytes(self) -> int:
        """Estimate the memory of outputs that are not read yet."""
        return sum(outbox.held_bytes() for outbox in self._outboxes)

    def check_same_weights(self) -> None:
        """Raise ConflictError if several weights made the outputs, so that their numbers cannot be compared."""
        if len(self._weights) > 1:
            raise ConflictError("The weights were replaced while the request ran. Send it again.")

    def _check_queue(self) -> None:
        """Check the queue for all prompts before sending any. Raises QueueFullError."""
        try:
            self.state.engine.check_queue(self._num_sequences)
        except HTTPError as error:
            self.state.metrics.count_error(error)
            raise

    def _check_key(self, key: KeyUsage) -> None:
        """Raise KeyLimitError if all sequences together exceed a limit of the API key."""
        try:
            key.check(self._num_sequences)
        except HTTPError as error:
            self.state.metrics.count_error(error)
            raise

    async def _measured(self, number: int) -> Outputs:
        """Yield the outputs of one prompt and record their timings. Runs for every token, so keep it cheap."""
        metrics, usage = self.state.metrics, self.usage
        times = metrics.latencies(self.options.priority)
        started = time.perf_counter()
        first: dict[int, tuple[float, float]] = {}  # choice -> time of its first token, seconds in the queue
        last: dict[int, float] = {}
        prompt = self.prompts[number]
        stream = self._generate(prompt)
        self.state.live.add(prompt.signal, prompt.request_id or self.options.request_id, self.caller)
        key = self._key
        if key is not None:
            key.begin(prompt.params.n, prompt.params.n * len(prompt.prompt_token_ids))
        try:
            async for output in stream:
                now = time.perf_counter()
                count = len(output.token_ids)
                if count:
                    before = last.get(output.index)
                    if before is None:
                        self._note_cached(number, output)
                        first[output.index] = now, output.queue_seconds
                        times.first_token(now - started, output.queue_seconds, output.prefill_seconds)
                        if self._record is not None:
                            self._record.note_first_token(now)
                    else:
                        times.inter_token.observe((now - before) / count)
                    last[output.index] = now
                    usage.completion_tokens += count
                    usage.accepted_tokens += output.num_accepted_drafts
                    usage.rejected_tokens += output.num_rejected_drafts
                    if key is not None:
                        key.generated(count)
                if output.finish_reason is not None:
                    self._finished(number, output)
                    begun, queued = first.get(output.index, (now, output.queue_seconds))
                    times.finished(output, prompt.params, now - started, now - begun, queued)
                yield number, output
        except HTTPError as error:
            metrics.count_error(error)
            raise
        finally:
            if key is not None:
                key.end(prompt.params.n, time.perf_counter() - started, self._cached[number])
            self.state.tracing.generation(self.options.request_id, time.perf_counter() - started, usage.as_dict())
            self.state.live.remove(prompt.signal)
            if self._record is not None:
                self._record.note_ended()
            await stream.aclose()

    def _generate(self, prompt: PromptTask) -> Stream:
        began = time.perf_counter()
        is_step = False

        def generate(prompt_token_ids: list[int], params: SamplingParams) -> Stream:
            """Send one request to the engine and return its stream. Later calls are further steps of the prompt."""
            nonlocal is_step
            outbox = OutputQueue()
            self._outboxes.add(outbox)
            stream: AsyncIterator[RequestOutput] = self.state.engine.generate(
                prompt_token_ids,
                params,
                request_id=self.caller.engine_name(prompt.request_id or self.options.request_id),
                priority=self.options.priority,
                cache_salt=self.options.cache_salt,
                adapter=self.options.adapter,
                replica=self.options.replica,
                tenant=None if self._key is None else self._key.tenant,
                deadline=self._seconds_left(began),
                signal=prompt.signal,
                pictures=prompt.pictures,
                outbox=outbox,
                already_accepted=self._is_begun and (self.at_once is not None or prompt.run is not None),
                partly_answered=is_step or self._is_answered,
            )
            self._is_begun = is_step = True
            return cast("Stream", stream)

        return generate(prompt.prompt_token_ids, prompt.params) if prompt.run is None else prompt.run(generate)

    def _seconds_left(self, began: float) -> float | None:
        """Return the seconds until the deadline of a prompt that began at `began`; None if there is no deadline.

        A beam search has one deadline, not one for each of its steps.
        """
        timeout = self.state.config.server.request_timeout
        return None if timeout is None else max(0.0, round(timeout - (time.perf_counter() - began), 3))

    def _finished(self, number: int, output: RequestOutput) -> None:
        self.state.metrics.requests.labels(str(output.finish_reason)).inc()
        self._weights.add(output.weights)
        self._is_answered = True
        self._note_cached(number, output)

    def _note_cached(self, number: int, output: RequestOutput) -> None:
        """Count the cached tokens of a prompt once, also if its reader leaves before the last output."""
        more = max(0, output.num_cached_tokens - self._cached[number])
        self._cached[number] += more
        self.usage.cached_tokens += more


def half_of_rows(info: EngineInfo) -> int:
    """Return how many prompts of one request should be in the engine at a time, so that others need not wait."""
    return max(1, info.max_num_seqs // 2)


async def embeddings(generation: Generation) -> list[bytes]:
    """Run prompts with `embed` and return the float32 bytes of each.

    Raises InvalidValueError if a prompt was aborted, and ConflictError if the weights were replaced meanwhile.
    """
    found: dict[int, bytes] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for number, output in outputs:
            if output.embedding is None:
                raise InvalidValueError("The request was aborted.", code="request_aborted")
            found[number] = output.embedding
    generation.check_same_weights()
    return [found[number] for number in range(len(generation.prompts))]


async def coalesce(stream: Outputs, interval: int) -> Outputs:
    """Merge outputs into fewer, larger ones. The first of each choice is passed on at once."""
    held: dict[tuple[int, int], list[RequestOutput]] = {}
    counts: dict[tuple[int, int], int] = {}
    async with aclosing(stream):
        async for number, output in stream:
            key = number, output.index
            first = key not in held
            outputs = held.setdefault(key, [])
            outputs.append(output)
            counts[key] = counts.get(key, 0) + len(output.token_ids)
            if first or output.finish_reason is not None or counts[key] >= interval:
                held[key] = []
                counts[key] = 0
                yield number, _joined(outputs)


def _joined(outputs: list[RequestOutput]) -> RequestOutput:
    """Join several outputs into one, in linear time."""
    if len(outputs) == 1:
        return outputs[0]
    return msgspec.structs.replace(
        outputs[-1],
        text="".join([each.text for each in outputs]),
        token_ids=_chained([each.token_ids for each in outputs]),
        logprobs=_chained([each.logprobs for each in outputs]),
        prompt_logprobs=_first([each.prompt_logprobs for each in outputs]),
        extras=TokenExtras.joined([each.extras for each in outputs]),
        weight_versions=joined_versions(*(each.weight_versions for each in outputs)),
    )


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _chained(values: Iterable[list[T] | None]) -> list[T] | None:
    """Concatenate the lists; None if there is none."""
    found = [value for value in values if value is not None]
    return list(itertools.chain.from_iterable(found)) if found else None


async def merge(streams: Sequence[AsyncGenerator[T, None]], at_once: int | None = None) -> AsyncGenerator[T, None]:
    """Interleave several streams. Closing the result closes all of them.

    at_once: number of streams that are read at a time; the next begins when one ends. None: all
    Raises the first error of any stream, which also ends the others.
    """
    queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue(MAX_MERGED)
    waiting = iter(streams)

    async def pump() -> None:
        """Put the items of streams into the queue, then None, or the error that ended one."""
        try:
            for stream in waiting:
                async with aclosing(stream):
                    async for item in stream:
                        await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    running = min(len(streams), at_once or len(streams))
    tasks: list[asyncio.Task[None]] = []
    try:
        for number in range(running):
            tasks.append(asyncio.create_task(pump()))
            if number % BEGUN_AT_ONCE == BEGUN_AT_ONCE - 1:
                await asyncio.sleep(0)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
                # many streams may have outputs ready at once, so yield to the event loop between them
                await asyncio.sleep(0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
