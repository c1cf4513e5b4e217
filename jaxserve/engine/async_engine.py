"""The engine as asyncio code sees it: `async for output in engine.generate(...)`.

Owns the link to the engine, the live sequences with their text state, and the engine's restarts. The engine knows
tokens; this side knows text. A sequence is kept here until its last output, with all that is needed to send it
again: after an engine death every live sequence is re-sent with the tokens it already has, so nothing is lost.

    generate() -> Add  ------------------------>  engine
    queue of RequestOutput  <- SequenceText  <-  Outputs
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxserve.config import Config
from jaxserve.engine.link import EngineLink, ProcessLink
from jaxserve.engine.messages import (
    Abort,
    Add,
    Call,
    EngineInfo,
    EngineStats,
    FromEngine,
    Located,
    Outputs,
    Reply,
)
from jaxserve.engine.output import RequestOutput, SequenceText
from jaxserve.engine.request import EngineRequest, FinishReason, SamplingParams, TokenOutput
from jaxserve.engine.supervisor import EngineStatus, Supervisor
from jaxserve.errors import (
    ConfigError,
    EngineDeadError,
    HTTPError,
    InvalidValueError,
    NotReadyError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
)
from jaxserve.text.tokenizer import Tokenizer

MAX_REPLAYS = 2  # a sequence that was live at more engine deaths than this is ended: it may be their cause

logger = logging.getLogger(__name__)


class _Outbox:
    """Outputs for one reader. An asyncio.Queue does the same at 1.5 us an item more, and every token passes here."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[RequestOutput | HTTPError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | HTTPError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput | HTTPError:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


@dataclass(slots=True, eq=False)
class _Live:
    """One sequence on its way: what was sent, its text state, and where its outputs go."""

    request: EngineRequest
    text: SequenceText
    outputs: _Outbox
    started: float = field(default_factory=time.monotonic)
    replays: int = 0


class AsyncEngine:
    """An engine behind a link; the default link is a child process."""

    def __init__(self, config: Config, link: EngineLink | None = None) -> None:
        self.config = config
        self._link = link or ProcessLink(config)
        self._supervisor = Supervisor(
            self._link,
            watchdog=config.server.watchdog_timeout,
            on_message=self._handle,
            on_ready=self._became_ready,
            on_death=self._fail_calls,
            on_end=self._fail_all,
        )
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._stats = EngineStats()
        self._live: dict[str, _Live] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._seeds = random.Random(config.runtime.random_seed)

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self, *, wait: bool = True) -> None:
        """Start the engine; with `wait`, return when it is ready. Raises ConfigError if it cannot start."""
        self._supervisor.start()
        if wait:
            await self.wait_ready()

    async def wait_ready(self) -> None:
        """Return when the engine is ready. Raises ConfigError or EngineDeadError if it never will be."""
        while self.status.phase != "ready":
            if self.status.phase == "dead":
                raise self.failure or EngineDeadError(self.status.detail)
            await self.next_status()

    async def next_status(self) -> EngineStatus:
        """The status after its next change."""
        return await self._supervisor.next_status()

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._supervisor.set_status(EngineStatus("draining"))

    async def drained(self, timeout: float) -> bool:
        """Wait until no request is live, at most `timeout` seconds; whether none is."""
        deadline = time.monotonic() + timeout
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._live

    async def stop(self) -> None:
        """End the engine. Live requests end with EngineDeadError."""
        await self._supervisor.stop()
        self._fail_all(EngineDeadError("the server stopped"))

    # -- what it is ----------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine. Raises NotReadyError before it was ready once."""
        if self._info is None:
            raise NotReadyError(f"the model is loading ({self.status.detail or 'starting'})")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NotReadyError("the tokenizer is loading")
        return self._tokenizer

    @property
    def status(self) -> EngineStatus:
        return self._supervisor.status

    @property
    def failure(self) -> ConfigError | None:
        """Why a start failed: a mistake of the operator, with its fix."""
        return self._supervisor.failure

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def alive(self) -> bool:
        """The engine is ready and ticks."""
        return self._supervisor.alive

    @property
    def num_live(self) -> int:
        """Sequences that were accepted and have not ended."""
        return len(self._live)

    def stats(self) -> EngineStats:
        """The engine's latest numbers, at most a second old."""
        return self._stats

    def check_ready(self) -> None:
        """Raises NotReadyError or EngineDeadError unless requests are accepted now."""
        if self.status.phase == "dead":
            raise EngineDeadError(f"the engine is dead: {self.status.detail}")
        if self.status.phase != "ready":
            raise NotReadyError(f"the server is {self.status.phase} ({self.status.detail or 'please wait'})")

    def check_queue(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Raises QueueFullError unless `n` more sequences of a prompt so long may wait."""
        section = self.config.scheduler
        free = self.info.max_num_seqs + section.max_queued_requests - len(self._live)
        if n > free:
            raise QueueFullError(f"the queue is full ({section.max_queued_requests} requests wait)")
        if section.max_queued_tokens is not None:
            waiting = self._stats.num_waiting_tokens
            if waiting and waiting + num_prompt_tokens > section.max_queued_tokens:
                raise QueueFullError(f"the queue is full ({waiting} prompt tokens wait)")

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        deadline: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate `params.n` sequences; yields deltas of each as they come. Closing the iterator aborts.

        deadline: seconds from now after which the request ends with RequestTimeoutError.
        Raises NotReadyError, QueueFullError or ContextLengthError before the first output, and any HTTPError later.
        """
        sequences = self._submit(prompt_token_ids, params, request_id, priority, cache_salt, deadline)
        outputs = sequences[0].outputs
        remaining = len(sequences)
        try:
            while remaining:
                output = await outputs.get()
                if isinstance(output, HTTPError):
                    raise output
                remaining -= output.finished
                yield output
        finally:
            self._drop(sequences)

    def _submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        cache_salt: str,
        deadline: float | None,
    ) -> list[_Live]:
        self.check_ready()
        self.check_queue(params.n, len(prompt_token_ids))
        base = request_id or uuid.uuid4().hex
        if f"{base}-0" in self._live:
            raise InvalidValueError(f"a request with the id {base!r} is running", param="request_id")
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        outputs = _Outbox()
        sequences = [
            self._live_sequence(base, index, seed, prompt_token_ids, params, priority, cache_salt, deadline, outputs)
            for index in range(params.n)
        ]
        for live in sequences:
            self._live[live.request.request_id] = live
            self._link.send(Add(live.request))
        return sequences

    def _live_sequence(
        self,
        base: str,
        index: int,
        seed: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        deadline: float | None,
        outputs: _Outbox,
    ) -> _Live:
        request = EngineRequest(
            request_id=f"{base}-{index}",
            prompt_token_ids=prompt_token_ids,
            params=_with_seed(params, seed + index),
            priority=priority,
            namespace=cache_salt,
            group=base if params.n > 1 else "",
            deadline=deadline,
        )
        return _Live(request, SequenceText(base, index, prompt_token_ids, params, self.tokenizer), outputs)

    def _drop(self, sequences: list[_Live]) -> None:
        """Forget the sequences of one request; those that still run are aborted."""
        running = [live.request.request_id for live in sequences if self._live.pop(live.request.request_id, None)]
        if running:
            self._link.send(Abort(running))

    async def abort(self, request_id: str) -> bool:
        """End a running request; its iterator gets a last output with finish_reason abort. Whether it ran."""
        ids = [key for key in self._live if key.rpartition("-")[0] == request_id]
        if ids:
            self._link.send(Abort(ids))
        return bool(ids)

    async def flush_cache(self) -> bool:
        """Drop the prefix cache; False if requests are using it."""
        return bool(await self.call("flush_cache"))

    async def call(self, method: str, **args: Any) -> Any:
        """An administrative call into the engine. Raises InvalidValueError with the engine's reason."""
        self.check_ready()
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._link.send(Call(call_id, method, args))
        try:
            return await future
        finally:
            del self._calls[call_id]

    # -- messages from the engine --------------------------------------------------------------------------

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs, stats):
                for output in outputs:
                    self._deliver(output)
                if stats is not None:
                    self._stats = stats
            case Located(_, tokenizer_dir):
                if self._tokenizer is None:
                    self._tokenizer = Tokenizer.from_directory(tokenizer_dir)
            case Reply(call_id, result, error):
                self._reply(call_id, result, error)

    def _became_ready(self, info: EngineInfo) -> None:
        self._info = info
        for live in list(self._live.values()):
            self._replay(live)

    def _replay(self, live: _Live) -> None:
        """Send a sequence to a new engine: its prompt, its seed, and the tokens it already has."""
        live.replays += 1
        if live.replays > MAX_REPLAYS:
            self._end_with_error(live, EngineDeadError("the engine died while this request ran, more than once"))
            return
        self._link.send(Add(_resumed(live)))

    def _deliver(self, output: TokenOutput) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return  # it ended on this side (stop string, disconnect) while the engine made one more token
        if output.finish_reason is FinishReason.ERROR:
            self._end_with_error(live, _error_of(output))
            return
        try:
            result = live.text.push(output)
        except Exception as error:  # the boundary of one request: its text must not end the others
            logger.exception("request %s failed", output.request_id)
            self._link.send(Abort([output.request_id]))
            self._end_with_error(live, ServerError(f"the output could not be decoded: {type(error).__name__}"))
            return
        if result.finished:
            del self._live[output.request_id]
        if live.text.stopped_by_text:
            self._link.send(Abort([output.request_id]))
        live.outputs.put(result)

    def _end_with_error(self, live: _Live, error: HTTPError) -> None:
        self._live.pop(live.request.request_id, None)
        live.outputs.put(error)

    def _fail_all(self, error: HTTPError) -> None:
        for live in list(self._live.values()):
            self._end_with_error(live, error)
        self._fail_calls(error)

    def _fail_calls(self, error: HTTPError) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _reply(self, call_id: int, result: Any, error: str | None) -> None:
        future = self._calls.get(call_id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(InvalidValueError(error))


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return msgspec.structs.replace(params, seed=seed & (2**63 - 1), n=1)


def _resumed(live: _Live) -> EngineRequest:
    deadline = live.request.deadline
    if deadline is not None:
        deadline = max(0.0, deadline - (time.monotonic() - live.started))
    tokens = list(live.text.output_token_ids)
    return msgspec.structs.replace(live.request, resumed_token_ids=tokens, deadline=deadline)


def _error_of(output: TokenOutput) -> HTTPError:
    """The exception that a failed output means."""
    message = output.error or "the request failed"
    if 400 <= output.error_status < 500:
        return InvalidValueError(message)
    return RequestTimeoutError(message) if output.error_status == 504 else ServerError(message)
