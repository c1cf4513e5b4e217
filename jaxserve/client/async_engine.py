"""The engine for asyncio code: `async for output in engine.generate(...)`.

Owns the link to the engine process, the live sequences with their text state, and the restarts. The engine process
knows tokens; this side knows text. A sequence is kept here until its last output. After a crash of the engine every
live sequence is sent again with the tokens it already has, so no output is lost.

    generate() -> Add  ------------------------>  engine
    queue of RequestOutput  <- SequenceText  <-  Outputs
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Unpack

import msgspec

from jaxserve.client.engine_calls import EngineCalls
from jaxserve.client.generate_options import GenerateOptions
from jaxserve.client.link import EngineLink, ProcessLink
from jaxserve.client.sequence_sender import SequenceSender
from jaxserve.client.sequence_table import LiveSequence, Outbox, SequenceTable
from jaxserve.client.supervisor import Death, EngineStatus, Supervisor
from jaxserve.config import Config
from jaxserve.errors import (
    ConfigError,
    EngineDeadError,
    HTTPError,
    InvalidValueError,
    NotReadyError,
    QueueFullError,
    ServerError,
)
from jaxserve.text.output.sequence_text import RequestOutput, SequenceText, error_of, make_stops
from jaxserve.text.stop import Stops
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import (
    Abort,
    Add,
    EngineInfo,
    EngineStats,
    FromEngine,
    Located,
    Outputs,
    Reply,
    WaitingRequest,
)
from jaxserve.types.output import FinishReason, TokenOutput
from jaxserve.types.request_seed import request_seed
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.siblings import siblings

logger = logging.getLogger(__name__)


class AsyncEngine:
    """An engine behind a link. The default link is a child process."""

    def __init__(self, config: Config, link: EngineLink | None = None) -> None:
        self.config = config
        self._link = link or ProcessLink(config)
        self._supervisor = Supervisor(
            self._link,
            watchdog=config.server.watchdog_timeout,
            on_message=self._handle,
            on_ready=self._became_ready,
            on_death=self._died,
            on_end=self._fail_all,
        )
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._stats = EngineStats()
        self._live = SequenceTable()
        self._sender = SequenceSender(
            self._live, self._link.send, self._end_with_error, self._supervisor.forget_restarts
        )
        self._calls = EngineCalls(self._link.send)
        self._seeds = random.Random(request_seed(config.runtime.random_seed))

    # -- start and stop ------------------------------------------------------------------------------------

    async def start(self, *, wait: bool = True) -> None:
        """Start the engine; with `wait`, return when it is ready. Raises ConfigError if it cannot start."""
        self._supervisor.start()
        if wait:
            await self.wait_ready()

    async def wait_ready(self) -> None:
        """Wait until the engine is ready. Raises ConfigError or EngineDeadError if it never will be."""
        while self.status.phase != "ready":
            if self.status.phase == "dead":
                raise self.failure or EngineDeadError(self.status.detail)
            await self.next_status()

    async def next_status(self) -> EngineStatus:
        """Return the status after its next change."""
        return await self._supervisor.next_status()

    def drain(self) -> None:
        """Refuse new requests from now on. Running requests continue."""
        self._supervisor.drain()

    async def drained(self, timeout: float) -> bool:
        """Wait until no request is live, at most `timeout` seconds. Returns whether none is."""
        deadline = time.monotonic() + timeout
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._live

    async def stop(self) -> None:
        """Stop the engine. Live requests end with EngineDeadError."""
        await self._supervisor.stop()
        self._fail_all(EngineDeadError("the server stopped"))

    # -- properties ----------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine. Raises NotReadyError if it has never been ready."""
        if self._info is None:
            raise NotReadyError(f"the model is loading ({self.status.detail or 'starting'})")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Raises NotReadyError while it is loading."""
        if self._tokenizer is None:
            raise NotReadyError("the tokenizer is loading")
        return self._tokenizer

    @property
    def status(self) -> EngineStatus:
        return self._supervisor.status

    @property
    def failure(self) -> ConfigError | None:
        """The operator's mistake that made a start fail, with its fix; None if there is none."""
        return self._supervisor.failure

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def alive(self) -> bool:
        """Whether the engine is ready and its heartbeat is recent."""
        return self._supervisor.alive

    @property
    def num_live(self) -> int:
        """Number of accepted sequences that have not ended."""
        return len(self._live)

    def stats(self) -> EngineStats:
        """The engine's latest statistics, at most 1 s old."""
        return self._stats

    def check_ready(self) -> None:
        """Raise NotReadyError or EngineDeadError unless requests are accepted now."""
        if self.status.phase == "dead":
            raise EngineDeadError(f"the engine is dead: {self.status.detail}")
        if self.status.phase != "ready":
            raise NotReadyError(f"the server is {self.status.phase} ({self.status.detail or 'please wait'})")

    def check_queue(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Raise QueueFullError unless `n` more sequences of so many prompt tokens may wait, InvalidValueError if they
        never can.
        """
        section = self.config.scheduler
        limit = self.info.max_num_seqs + section.max_queued_requests
        if n > limit:
            raise InvalidValueError(f"{n} sequences are more than the {limit} that the queue holds", param="n")
        if n > limit - len(self._live):
            message = f"the queue is full ({section.max_queued_requests} requests wait)"
            raise QueueFullError(message, limit="max_queued_requests")
        waiting, limit = self._live.num_waiting_tokens, section.max_queued_tokens
        if limit is not None and waiting and waiting + n * num_prompt_tokens > limit:
            raise QueueFullError(f"the queue is full ({waiting} prompt tokens wait)", limit="max_queued_tokens")

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[RequestOutput]:
        """Generate `params.n` sequences and yield the new text and tokens of each as they come. Closing the iterator
        aborts.

        Raises NotReadyError, QueueFullError or a RequestError before the first output, and any HTTPError later.
        """
        request = EngineRequest(
            request_id="",
            client_id=options.get("request_id") or uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            params=params,
            priority=options.get("priority", 0),
            namespace=options.get("cache_salt", ""),
            deadline=options.get("deadline"),
        )
        given, signal = options.get("outbox"), options.get("signal")
        outputs = Outbox() if given is None else given
        sequences = self._submit(request, outputs)
        logger.debug(
            "request %s accepted: %d choices from engine request %s on, %d prompt tokens, %d live",
            *(request.client_id, len(sequences), sequences[0].engine_id, len(prompt_token_ids), len(self._live)),
        )
        remaining = len(sequences)
        abort = functools.partial(self._abort, sequences)
        if signal is not None:
            signal.attach(abort)
        try:
            while remaining:
                output = await outputs.get()
                if isinstance(output, HTTPError):
                    raise output
                remaining -= output.finished
                if output.finished:
                    logger.debug(
                        "request %s: choice %d finished: %s", request.client_id, output.index, output.finish_reason
                    )
                yield output
        finally:
            if signal is not None:
                signal.detach(abort)
            self._drop(sequences)

    def _submit(self, request: EngineRequest, outputs: Outbox) -> list[LiveSequence]:
        """Send a request as `params.n` sequences. If it raises, nothing was sent and nothing is live."""
        self.check_ready()
        self.check_queue(request.params.n, len(request.prompt_token_ids))
        seed = request.params.seed
        own = siblings(request, self._live.new_id, self._seeds.getrandbits(63) if seed is None else seed)
        message = Add.of(*own)
        stops = make_stops(request.params)
        sequences = [LiveSequence(each, self._text(each, index, stops), outputs) for index, each in enumerate(own)]
        thinks = sequences[0].text.thinks_too_long  # a thinking budget of 0
        for sequence in sequences:
            self._live.add(sequence)
            if thinks:
                self._end_thinking(sequence)
        if not thinks:
            self._sender.send(sequences, message)
        return sequences

    def _text(self, request: EngineRequest, index: int, stops: Stops | None) -> SequenceText:
        return SequenceText(request.client_id, index, request.prompt_token_ids, request.params, self.tokenizer, stops)

    def _drop(self, sequences: list[LiveSequence]) -> None:
        """Forget the sequences of one request and abort those that still run."""
        running = [sequence.engine_id for sequence in sequences if self._live.remove(sequence)]
        if running:
            self._link.send(Abort(running))
            self._sender.settle()

    async def abort(self, request_id: str) -> bool:
        """Abort all running requests with this id. Returns whether there were any.

        Their iterators yield a last output with finish_reason abort.
        """
        return self._abort(self._live.of_client(request_id))

    def _abort(self, sequences: Iterable[LiveSequence]) -> bool:
        found = [each for each in sequences if self._live.get(each.engine_id) is each]
        sent = [sequence.engine_id for sequence in found if sequence.is_sent]
        for sequence in found:
            sequence.aborted = True
            if not sequence.is_sent:
                self._answer_abort(sequence)
        if sent:
            self._link.send(Abort(sent))
        self._sender.settle()
        return bool(found)

    def _answer_abort(self, sequence: LiveSequence) -> None:
        """Answer an abort in place of an engine that does not have the sequence."""
        self._deliver(TokenOutput(request_id=sequence.engine_id, finish_reason=FinishReason.ABORT))

    async def flush_cache(self) -> bool:
        """Clear the prefix cache. Pages in use are freed when their requests end."""
        return bool(await self.call("flush_cache"))

    async def waiting(self) -> list[WaitingRequest]:
        """The requests that have no slot yet, the first 1,024 of them, each with the reason why it waits."""
        return msgspec.convert(await self.call("waiting"), list[WaitingRequest])

    async def call(self, method: str, **args: Any) -> Any:
        """Make an administrative call to the engine. Raises InvalidValueError with the engine's reason."""
        self.check_ready()
        return await self._calls.call(method, args)

    # -- messages from the engine --------------------------------------------------------------------------

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs, stats, admitted):
                self._live.admit(admitted)
                self._sender.take(outputs)
                for output in outputs:
                    self._deliver(output)
                self._sender.settle()
                if stats is not None:
                    self._stats = stats
            case Located(_, tokenizer_dir):
                if self._tokenizer is None:
                    self._tokenizer = Tokenizer.from_directory(tokenizer_dir)
            case Reply():
                self._calls.take(message)

    def _died(self, error: EngineDeadError) -> Death:
        self._calls.fail(error)
        death = self._sender.died(self._link.in_work())
        for sequence in self._live:
            if sequence.aborted:
                self._answer_abort(sequence)
        return death

    def _became_ready(self, info: EngineInfo) -> None:
        self._info = info
        self._sender.ready()

    def _deliver(self, output: TokenOutput) -> None:
        sequence = self._live.get(output.request_id)
        if sequence is None:
            return  # already ended here (stop string, disconnect) while the engine computed one more token
        if output.finish_reason is FinishReason.ERROR:
            self._end_with_error(sequence, _failure(output, sequence))
            return
        self._deliver_text(sequence, sequence.text.push, output)
        sequence.is_answered = True
        if sequence.text.thinks_too_long and not sequence.aborted and self._live.get(sequence.engine_id) is sequence:
            self._link.send(Abort([sequence.engine_id]))
            self._end_thinking(sequence)

    def _end_thinking(self, sequence: LiveSequence) -> None:
        """Append the end of the thinking as if the model had sampled it. All tokens so far are output.

        The engine gets the sequence under a new id, so that late outputs for the old id are ignored.
        """
        self._live.renew_id(sequence)
        self._deliver_text(sequence, sequence.text.end_thinking)
        if self._live.get(sequence.engine_id) is not None:
            self._sender.send([sequence])

    def _deliver_text(self, sequence: LiveSequence, take: Callable[..., RequestOutput], *outputs: TokenOutput) -> None:
        """Deliver the result of `take`. It may find the end of the sequence."""
        try:
            result = take(*outputs)
        except Exception as error:  # the boundary of one request: an error in its text must not end the others
            logger.exception("request %s failed", sequence.request.client_id)
            self._link.send(Abort([sequence.engine_id]))
            self._end_with_error(sequence, ServerError(f"the output could not be decoded: {type(error).__name__}"))
            return
        if sequence.waiting:
            self._live.started(sequence)
        if result.finished:
            self._live.remove(sequence)
        if sequence.text.stopped_by_text:
            self._link.send(Abort([sequence.engine_id]))
        sequence.outputs.put(result)

    def _end_with_error(self, sequence: LiveSequence, error: HTTPError) -> None:
        self._live.remove(sequence)
        sequence.outputs.put(error)

    def _fail_all(self, error: HTTPError) -> None:
        for sequence in self._live:
            self._end_with_error(sequence, error)
        self._calls.fail(error)


def _failure(output: TokenOutput, sequence: LiveSequence) -> HTTPError:
    """Return the exception for a failed output."""
    error = error_of(output)
    # an engine accepted it before the crash, so it is not the client's mistake that the next one refuses it
    if sequence.was_admitted and error.status < 500:
        return ServerError(f"the engine was restarted and cannot go on with this request: {error.message}")
    return error
