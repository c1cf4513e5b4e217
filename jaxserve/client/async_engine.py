"""The engine for asyncio code: `async for output in engine.generate(...)`.

The `AsyncEngine` owns the live sequences with their text state, and the replicas: the engine processes. An engine
process knows tokens; this side knows text. A sequence is kept here until its last output. After a crash of the engine
every live sequence is sent again with the tokens that it already has, so no output is lost.

    generate() -> Add  ------------------------>  engine
    queue of RequestOutput  <- SequenceText  <-  Outputs

`GenerateOptions` are the optional arguments of every `generate` of one prompt. An `AbortSignal` aborts requests from
outside of their iterators. `check_queue` enforces scheduler.max_queued_requests and scheduler.max_queued_tokens.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import msgspec

from jaxserve.client.link import EngineLink, Roles, process_links
from jaxserve.client.replica_set import ReplicaSet, SequenceEvents
from jaxserve.client.replicas import Replica, ReplicaState
from jaxserve.client.sequences import LiveSequence, OutputQueue, SequenceTable
from jaxserve.client.supervisor import EngineStatus
from jaxserve.config import Config, SchedulerSection
from jaxserve.errors import (
    ConfigError,
    EngineDeadError,
    HTTPError,
    InvalidValueError,
    NotReadyError,
    QueueFullError,
    ServerError,
)
from jaxserve.text.detokenizer import RequestOutput, SequenceText, make_stops
from jaxserve.text.stop import Stops
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.calls import EngineCall, ListWaiting
from jaxserve.types.messages import (
    AdapterStatus,
    Add,
    EngineInfo,
    EngineStats,
    FromEngine,
    Located,
    Outputs,
    Reply,
    RequestRefused,
    WaitingRequest,
)
from jaxserve.types.page_keys import namespace_of
from jaxserve.types.picture import Picture
from jaxserve.types.sampling import EngineRequest, SamplingParams, Tenant, request_seed, siblings
from jaxserve.types.step import FinishReason, TokenOutput

logger = logging.getLogger(__name__)

AbortCallback = Callable[[int | None], object]


class AbortSignal:
    """Aborts the attached requests: the running ones, and any submitted after the signal was set.

    So it also stops a generation of several consecutive requests that is between two of them. A callback gets the index
    of the choice to abort; None: all.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._callbacks: dict[int, AbortCallback] = {}

    def set(self) -> None:
        self.is_set = True
        for callback in list(self._callbacks.values()):
            callback(None)

    def abort_choice(self, index: int) -> None:
        """Abort one choice of the running requests."""
        for callback in list(self._callbacks.values()):
            callback(index)

    def attach(self, callback: AbortCallback) -> None:
        """Call `callback` when the signal is set; at once if it is set already."""
        self._callbacks[id(callback)] = callback
        if self.is_set:
            callback(None)

    def detach(self, callback: AbortCallback) -> None:
        self._callbacks.pop(id(callback), None)


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `EngineProtocol.generate`."""

    request_id: str | None  # for `abort` and logs; need not be unique
    priority: int  # lower runs earlier; default 0
    cache_salt: str  # prompts share cached prefixes only within a salt; default ""
    adapter: str  # digest of a loaded adapter; default "", none
    tenant: Tenant | None  # owner of the request; default: one tenant that all such requests share
    deadline: float | None  # seconds from now after which the request ends with RequestTimeoutError
    signal: AbortSignal | None  # aborts this request and no other; it ends with finish_reason abort
    replica: int | None  # the engine that computes it; default: the router chooses
    # a request that was accepted needs the engine again, so no drain and no full queue refuses it
    already_accepted: bool
    # an engine has answered a part of the same request, so a pause that waits for requests waits for it
    partly_answered: bool
    pictures: tuple[Picture, ...]  # of the prompt, in its order
    outbox: OutputQueue | None  # the queue of unread outputs, if the caller wants to know its size


class Load(NamedTuple):
    """Number of sequences that run or wait, and of prompt tokens that wait."""

    num_live: int
    waiting_tokens: int


def check_queue(section: SchedulerSection, max_num_seqs: int, load: Load, more: Load) -> None:
    """Raise QueueFullError unless `more` may wait now, and InvalidValueError if it never may."""
    limit, n = max_num_seqs + section.max_queued_requests, more.num_live
    if n > limit:
        raise InvalidValueError(f"{n} sequences are more than the {limit} that the queue holds", param="n")
    if n > limit - load.num_live:
        message = f"the queue is full ({section.max_queued_requests} requests wait)"
        raise QueueFullError(message, limit="max_queued_requests")
    waiting, most = load.waiting_tokens, section.max_queued_tokens
    if most is not None and waiting and waiting + more.waiting_tokens > most:
        raise QueueFullError(f"the queue is full ({waiting} prompt tokens wait)", limit="max_queued_tokens")


class AsyncEngine:
    """One engine or several replicas behind links. The default links are child processes.

    link: the connection to the engine, or one for each replica
    id_prefix: prefix of the engine ids made here, if other processes make ids for the same engine
    """

    def __init__(
        self, config: Config, link: EngineLink | Sequence[EngineLink] | None = None, *, id_prefix: str = ""
    ) -> None:
        self.config = config
        links = process_links(config) if link is None else link if isinstance(link, Sequence) else [link]
        self.located: Located | None = None  # the files of the model
        self._tokenizer: Tokenizer | None = None
        self._live = SequenceTable(id_prefix)
        self._replicas = ReplicaSet(
            links,
            config.server.watchdog_timeout,
            self._live,
            Roles.of_config(config, len(links)),
            SequenceEvents(self._handle, self._answer_abort, self._end_with_error, self._fail_all),
        )
        self._seeds = random.Random(request_seed(config.runtime.random_seed))

    # -- start and stop ------------------------------------------------------------------------------------

    def load_first(self, adapters: Sequence[AdapterStatus]) -> None:
        """Load adapters of an earlier run in every engine, before its first request. Call this before `start`.

        One whose directory is gone, or has changed, is a line in the log.
        """
        self._replicas.load_first(adapters)

    async def start(self, *, wait: bool = True) -> None:
        """Start the engine; with `wait`, return when it is ready. Raises ConfigError if it cannot start."""
        self._replicas.start()
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
        return await self._replicas.next_status()

    def drain(self) -> None:
        """Refuse new requests from now on. Running requests continue."""
        self._replicas.drain()

    async def drained(self, timeout: float, others: Callable[[], int] = lambda: 0) -> bool:
        """Wait at most `timeout` seconds until no request is live and `others` returns 0. Return whether that came."""
        deadline = time.monotonic() + timeout
        while (self._live or others()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not (self._live or others())

    async def stop(self) -> None:
        """Stop the engine. Live requests end with EngineDeadError first, because a stuck engine takes a while."""
        error = EngineDeadError("the server stopped")
        for sequence in self._live:
            self._end_with_error(sequence, error)
        await self._replicas.stop()
        self._fail_all(error)

    # -- properties ----------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Properties of all replicas together. Raises NotReadyError unless `was_ready`."""
        if (info := self._replicas.info) is None:
            raise NotReadyError(f"the model is loading ({self.status.detail or 'starting'})")
        return info

    @property
    def was_ready(self) -> bool:
        return self._replicas.info is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Raises NotReadyError while it is loading."""
        if self._tokenizer is None:
            raise NotReadyError("the tokenizer is loading")
        return self._tokenizer

    @property
    def status(self) -> EngineStatus:
        return self._replicas.status

    @property
    def failure(self) -> ConfigError | None:
        """The operator's mistake that made a start fail, with its fix; None if there is none."""
        return self._replicas.failure

    @property
    def restarts(self) -> int:
        return self._replicas.restarts

    @property
    def alive(self) -> bool:
        """Whether a replica is ready and its heartbeat is recent."""
        return self._replicas.alive

    @property
    def replicas(self) -> list[ReplicaState]:
        """The state of each replica."""
        return self._replicas.states

    @property
    def num_live(self) -> int:
        """Number of accepted sequences that have not ended."""
        return len(self._live)

    @property
    def load(self) -> Load:
        """Number of accepted sequences that have not ended, and of their prompt tokens that wait."""
        return Load(len(self._live), self._live.num_waiting_tokens)

    def stats(self) -> EngineStats:
        """Return the latest statistics of all replicas together, at most 1 s old."""
        return self._replicas.stats()

    def check_ready(self) -> None:
        """Raise NotReadyError or EngineDeadError unless requests are accepted now."""
        if self.status.phase == "dead":
            raise EngineDeadError(f"the engine is dead: {self.status.detail}")
        if self.status.phase != "ready":
            raise NotReadyError(f"the server is {self.status.phase} ({self.status.detail or 'please wait'})")

    def check_queue(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Raise QueueFullError unless `n` more sequences may wait now, and InvalidValueError if they never may.

        num_prompt_tokens: prompt tokens of each sequence
        """
        check_queue(self.config.scheduler, self.info.max_num_seqs, self.load, Load(n, n * num_prompt_tokens))

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[RequestOutput]:
        """Generate `params.n` sequences and yield the new text and tokens of each as they come.

        Closing the iterator aborts them. Raises NotReadyError, QueueFullError or a RequestError before the first
        output, and any HTTPError later.
        """
        request = EngineRequest(
            request_id="",
            client_id=options.get("request_id") or uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            params=params,
            priority=options.get("priority", 0),
            namespace=namespace_of(options.get("adapter", ""), options.get("cache_salt", "")),
            adapter=options.get("adapter", ""),
            tenant=options.get("tenant"),
            deadline=options.get("deadline"),
            replica=options.get("replica"),
            already_accepted=options.get("already_accepted", False),
            partly_answered=options.get("partly_answered", False),
            pictures=options.get("pictures", ()),
        )
        given, signal = options.get("outbox"), options.get("signal")
        outputs = OutputQueue() if given is None else given
        sequences = self._begin(request, outputs)
        logger.debug(
            "request %s accepted: %d choices from engine request %s on, %d prompt tokens, %d live",
            *(request.client_id, len(sequences), sequences[0].engine_id, len(prompt_token_ids), self.num_live),
        )
        remaining = len(sequences)
        abort = functools.partial(self._abort_choice, sequences)
        if signal is not None:
            signal.attach(abort)
        try:
            while remaining:
                output = await outputs.get()
                if isinstance(output, HTTPError):
                    raise output
                if output.finish_reason is not None:
                    remaining -= 1
                    logger.debug(
                        "request %s: choice %d finished: %s", request.client_id, output.index, output.finish_reason
                    )
                yield output
        finally:
            if signal is not None:
                signal.detach(abort)
            self._drop(sequences)

    def submit(self, sequences: list[LiveSequence], message: Add) -> None:
        """Send the sequences of one request of another process. Raises as `generate` does before the first output.

        A request that an engine has answered is not refused for the queue or a restart.
        """
        is_accepted = sequences[0].is_answered or message.request.already_accepted
        self._check_accepts(message.request, len(sequences), len(message.token_ids), is_accepted=is_accepted)
        for sequence in sequences:
            self._live.add(sequence)
        self._replicas.place(sequences, message)
        self._replicas.send(sequences, message)

    def _begin(self, request: EngineRequest, outputs: OutputQueue) -> list[LiveSequence]:
        """Send a request as `params.n` sequences. If it raises, nothing was sent and nothing is live."""
        self._check_accepts(
            request, request.params.n, len(request.prompt_token_ids), is_accepted=request.already_accepted
        )
        seed = request.params.seed
        own = siblings(request, self._live.new_id, self._seeds.getrandbits(63) if seed is None else seed)
        message = Add.of(*own)
        stops = make_stops(request.params)
        sequences = [LiveSequence(each, self._text(each, index, stops), outputs) for index, each in enumerate(own)]
        thinks_too_long = sequences[0].text.thinks_too_long  # a thinking budget of 0
        for sequence in sequences:
            self._live.add(sequence)
        self._replicas.place(sequences, message)
        if thinks_too_long:
            for sequence in sequences:
                self._end_thinking(sequence)
        else:
            self._replicas.send(sequences, message)
        return sequences

    def _check_accepts(self, request: EngineRequest, n: int, num_prompt_tokens: int, *, is_accepted: bool) -> None:
        """Raise as `generate` does before the first output. Only a dead engine refuses an accepted request."""
        if not is_accepted:
            self.check_ready()
            self.check_queue(n, num_prompt_tokens)
            self._replicas.check_named(request.replica, self.config.mesh.replicas)
        elif self.status.phase == "dead":
            raise EngineDeadError(f"the engine is dead: {self.status.detail}")

    def _text(self, request: EngineRequest, index: int, stops: Stops | None) -> SequenceText:
        return SequenceText(request.client_id, index, request.prompt_token_ids, request.params, self.tokenizer, stops)

    def _drop(self, sequences: list[LiveSequence]) -> None:
        """Forget the sequences of one request and abort those that still run."""
        running = [sequence for sequence in sequences if self._live.remove(sequence)]
        if running:
            self._replicas.abort(running)
            self._replicas.advance()

    async def abort(self, request_id: str) -> bool:
        """Abort all running requests with this id. Returns whether there were any.

        Their iterators yield a last output with finish_reason abort.
        """
        return self.abort_sequences(self._live.of_client(request_id))

    def abort_sequences(self, sequences: Iterable[LiveSequence]) -> bool:
        """Abort the sequences that are live. Each ends with an output. Return whether there were any."""
        found = [each for each in sequences if self._live.get(each.engine_id) is each]
        sent = [sequence for sequence in found if sequence.is_sent]
        for sequence in found:
            sequence.aborted = True
            if not sequence.is_sent:
                self._answer_abort(sequence)
        if sent:
            self._replicas.abort(sent)
        self._replicas.advance()
        return bool(found)

    def _abort_choice(self, sequences: Sequence[LiveSequence], index: int | None) -> None:
        """Abort one choice of a request; None: all."""
        self.abort_sequences(sequences if index is None else sequences[index : index + 1])

    def _answer_abort(self, sequence: LiveSequence) -> None:
        """Answer an abort in place of an engine that does not have the sequence."""
        self._deliver(TokenOutput(request_id=sequence.engine_id, finish_reason=FinishReason.ABORT))

    async def waiting(self) -> list[WaitingRequest]:
        """Return the requests that have no slot yet, the first 1,024 of them, each with the reason why it waits."""
        return msgspec.convert(await self.call(ListWaiting()), list[WaitingRequest])

    async def call(self, call: EngineCall) -> Any:
        """Make a call to all replicas. Raises an HTTPError with an engine's reason."""
        self.check_ready()
        return await self._replicas.call(call)

    async def finish(self) -> bool:
        """Pause when the requests that have arrived so far have ended. Returns False if that was given up."""
        self.check_ready()
        return await self._replicas.finish()

    # -- messages from the engine --------------------------------------------------------------------------

    def _handle(self, replica: Replica, message: FromEngine | RequestRefused) -> None:
        match message:
            case Outputs(outputs, stats, admitted, pages):
                if admitted:
                    self._live.admit(admitted)
                if replica.sender.is_watching:
                    replica.sender.receive(outputs)
                for output in outputs:
                    self._deliver(output)
                self._replicas.advance()
                if stats is not None:
                    self._replicas.stats_changed(replica, stats)
                if pages is not None:
                    self._replicas.pages_changed(replica, pages)
            case Located(tokenizer_dir):
                self.located = message
                if self._tokenizer is None:
                    self._tokenizer = Tokenizer.from_directory(tokenizer_dir)
            case RequestRefused() if (sequence := self._live.get(message.request_id)) is not None:
                self._end_with_error(sequence, message.error())
            case Reply():
                replica.calls.receive(message)

    def _deliver(self, output: TokenOutput) -> None:
        sequence = self._live.get(output.request_id)
        if sequence is None:
            return  # already ended here (stop string, disconnect) while the engine computed one more token
        if sequence.prefill_only and self._replicas.take_prompt(sequence, output):
            return
        if output.finish_reason is FinishReason.ERROR:
            self._end_with_error(sequence, sequence.failure(output))
            return
        self._deliver_text(sequence, sequence.text.push, output)
        sequence.is_answered = True
        if sequence.suspected:
            sequence.suspected -= 1
        if sequence.text.thinks_too_long and not sequence.aborted and self._live.get(sequence.engine_id) is sequence:
            self._replicas.abort([sequence])
            self._end_thinking(sequence)

    def _end_thinking(self, sequence: LiveSequence) -> None:
        """Append the end of the thinking as if the model had sampled it. All tokens so far are output.

        The engine gets the sequence under a new id, so that late outputs for the old id are ignored.
        """
        self._live.renew_id(sequence)
        self._deliver_text(sequence, sequence.text.end_thinking)
        if self._live.get(sequence.engine_id) is not None:
            self._replicas.resend(sequence)

    def _deliver_text(self, sequence: LiveSequence, push: Callable[..., Any], *outputs: TokenOutput) -> None:
        """Deliver the result of `push(*outputs)`, which may find the end of the sequence."""
        try:
            result = push(*outputs)
        except Exception as error:  # the boundary of one request: an error in its text must not end the others
            logger.exception("request %s failed", sequence.request.client_id)
            self._replicas.abort([sequence])
            self._end_with_error(sequence, ServerError(f"the output could not be decoded: {type(error).__name__}"))
            return
        if sequence.waiting:
            self._live.mark_started(sequence)
        if result.finish_reason is not None:
            self._live.remove(sequence)
        if sequence.text.stopped_by_text:
            self._replicas.abort([sequence])
        sequence.outputs.put(result)

    def _end_with_error(self, sequence: LiveSequence, error: HTTPError) -> None:
        self._live.remove(sequence)
        sequence.outputs.put(error)

    def _fail_all(self, error: HTTPError) -> None:
        for sequence in self._live:
            self._end_with_error(sequence, error)
        self._replicas.fail_calls(error)
