"""The engine loop: receives messages, runs steps, sends outputs. Runs in a child process or in a thread.

It uses an EngineCore and a Channel, and knows no sockets, text or HTTP. An error of one request ends only that request.

The outputs of a batch request are sent in groups: one message per step would cost the API process more than online
requests do, and no client reads them token by token. The log has debug lines for the life of a request, and StatsLog's
lines about busy periods. scheduler/admission.py logs why a request waits, and the scheduler its preemption.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from jaxserve.engine.core import EngineCore, Prepare, StepError
from jaxserve.errors import HTTPError, InvalidValueError, JaxserveError
from jaxserve.log import fields
from jaxserve.runtime.saved_programs.executable import lacks_function
from jaxserve.transport.shared_state import RecordingRunner, SharedState, WorkRecord
from jaxserve.types.calls import (
    EngineCall,
    FlushCache,
    ListWaiting,
    LoadAdapter,
    ReadPages,
    UnloadAdapter,
    WorkerCall,
    WritePages,
)
from jaxserve.types.extras import TokenExtras
from jaxserve.types.messages import (
    Abort,
    Add,
    Call,
    EngineInfo,
    EngineStats,
    FromEngine,
    Outputs,
    Ready,
    Reply,
    Stop,
    ToEngine,
)
from jaxserve.types.sampling import BACKGROUND_PRIORITY, EngineRequest
from jaxserve.types.step import FIRST_VERSION, FinishReason, TokenOutput, joined_versions

if TYPE_CHECKING:
    from jaxserve.engine.control import EngineControl
    from jaxserve.engine.late_start import LateStart
    from jaxserve.engine.page_handover import PageHandover


logger = logging.getLogger(__name__)

# after a crash of this process, a new engine computes at most so many tokens of a batch request again
GROUP_TOKENS = 64


class OutputGroups:
    """Collects the outputs of watched requests. The first and the last output of each are sent at once."""

    def __init__(self) -> None:
        self._held: dict[str, TokenOutput | None] = {}  # None: no output yet

    def __len__(self) -> int:
        """Return the number of watched requests."""
        return len(self._held)

    def watch(self, request: EngineRequest) -> None:
        """Group the outputs of a batch request, unless it has stop strings, which the API process finds."""
        params = request.params
        if params.grouped and request.priority >= BACKGROUND_PRIORITY and not (params.stop or params.stop_regex):
            self._held[request.request_id] = None

    def take(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Return the outputs to send now. Collected tokens are sent with the output that follows them."""
        if not self._held:
            return outputs
        return [ready for output in outputs if (ready := self._join(output)) is not None]

    def _join(self, output: TokenOutput) -> TokenOutput | None:
        request_id = output.request_id
        if request_id not in self._held:
            return output
        before = self._held[request_id]
        if before is not None:
            _prepend(before, output)
        if output.finish_reason is not None:
            del self._held[request_id]
            return output
        if before is None or len(output.token_ids) >= GROUP_TOKENS:
            self._held[request_id] = TokenOutput(request_id=request_id)
            return output
        self._held[request_id] = output
        return None


def _prepend(before: TokenOutput, output: TokenOutput) -> None:
    """Prepend the collected tokens of the same request to `output`."""
    if before.weight_versions or output.weight_versions:
        made = [each.weight_versions or (FIRST_VERSION,) for each in (before, output) if each.is_made]
        output.weight_versions = joined_versions(*made)
    output.token_ids = before.token_ids + output.token_ids
    if before.logprobs is not None:
        output.logprobs = before.logprobs + (output.logprobs or [])
    output.prompt_logprobs = before.prompt_logprobs or output.prompt_logprobs
    output.extras = TokenExtras.joined([before.extras, output.extras])
    output.num_accepted_drafts += before.num_accepted_drafts
    output.num_rejected_drafts += before.num_rejected_drafts


def log_received(requests: Iterable[EngineRequest], num_prompt_tokens: int) -> None:
    """Log that requests were received. num_prompt_tokens: length of the prompt that they share"""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for request in requests:
        logger.debug(
            "request %s (%s) received: %d prompt tokens, at most %s new ones, priority %d%s",
            *(request.request_id, request.client_id, num_prompt_tokens, request.params.max_tokens, request.priority),
            ", its grammar is compiled first" if request.params.grammar is not None else "",
        )


def log_iteration(started: Iterable[str], outputs: Iterable[TokenOutput]) -> None:
    """Log one iteration of the engine loop. started: ids of the requests that were given a slot"""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for request_id in started:
        logger.debug("request %s starts", request_id)
    for output in outputs:
        if output.first_token_seconds:
            logger.debug("request %s has its first token after %.3f s", output.request_id, output.first_token_seconds)
        if output.finish_reason is not None:
            logger.debug(
                "request %s finished: %s, %d preemptions%s",
                *(output.request_id, output.finish_reason, output.num_preemptions),
                f", {output.error}" if output.error else "",
            )


class StatsLog:
    """Writes a line at most every `interval` seconds, each about a busy period of at most that length.

    Idle gaps shorter than the interval belong to the busy period. A single request that finishes within the interval
    leaves no line. num_pages: size of the whole pool.
    """

    def __init__(
        self, interval: float, num_pages: int, page_size: int, reasons: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._interval = interval
        self._reasons = reasons
        self._num_pages = max(1, num_pages)  # an encoder has no pages
        self._page_size = page_size
        self._last = EngineStats()  # at the start of the current period
        self._started: float | None = None  # start of the current period, time.monotonic(); None: idle
        self._last_busy = 0.0  # time.monotonic()
        self._has_written = False  # a line was written since the engine was last idle

    def update(self, stats: Callable[[], EngineStats], *, busy: bool, now: float) -> None:
        """Process one iteration of the engine loop at time.monotonic() `now` and write the lines that are due.

        stats: called only if a busy period ends or a line is due
        """
        if busy:
            self._work(stats, now)
        elif self._started is not None and now - self._last_busy >= self._interval:
            self._rest(stats())

    def _work(self, stats: Callable[[], EngineStats], now: float) -> None:
        self._last_busy = now
        if self._started is None:
            self._started, self._has_written = now, False
        elif now - self._started >= self._interval:
            self._write(stats(), now - self._started)
            self._started, self._has_written = now, True

    def _rest(self, stats: EngineStats) -> None:
        """End a busy period. Write a line if the period had lines before."""
        if self._has_written and self._started is not None:
            self._write(stats, self._last_busy - self._started, ", idle")
        self._last, self._started = stats, None

    def _write(self, stats: EngineStats, seconds: float, note: str = "") -> None:
        seconds = max(seconds, 1e-9)
        last, self._last = self._last, stats
        new = stats.computed_prompt_tokens - last.computed_prompt_tokens
        cached = stats.cached_tokens - last.cached_tokens
        if new or cached:
            logger.info(
                "prefill: new tokens %d, cached tokens %d, %.1f tokens/s, running %d, queued %d",
                *(new, cached, new / seconds, stats.num_running, stats.num_waiting),
                extra=fields(event="prefill", new_tokens=new, cached_tokens=cached, seconds=round(seconds, 3)),
            )
        if counts := Counter(self._reasons()).most_common():
            said = "; ".join(f"{count} for {reason}" for reason, count in counts)
            logger.info("waiting: %s", said, extra=fields(event="waiting", reasons=dict(counts)))
        generated = stats.generation_tokens - last.generation_tokens
        named: dict[str, float] = {
            "running": stats.num_running,
            "queued": stats.num_waiting,
            "output_tokens": generated,
        }
        named |= {"steps": stats.steps - last.steps, "retracted": stats.preemptions - last.preemptions}
        named["kv_used"] = round(stats.num_pages_used / self._num_pages, 4)
        logger.info(
            "decode: running %d, queued %d, %.1f tokens/s, KV tokens %d (%.2f), steps %d, retracted %d%s",
            *(stats.num_running, stats.num_waiting, generated / seconds, stats.num_pages_used * self._page_size),
            *(stats.num_pages_used / self._num_pages, stats.steps - last.steps, stats.preemptions - last.preemptions),
            note,
            extra=fields(event="load", seconds=round(seconds, 3), **named),
        )


STATS_INTERVAL = 0.25  # minimum seconds between two stats messages of a busy engine; one costs about 20 us
IDLE_WAIT = 1.0  # maximum seconds that an idle loop sleeps, so that stats and deadlines advance
MAX_REBUILDS = 3  # failed steps within REBUILD_WINDOW that lead to a rebuild; one more ends the process
REBUILD_WINDOW = 600.0  # seconds
COMPILE_WAIT = 0.002  # seconds between two checks of grammars being compiled, if nothing else runs


class Channel(Protocol):
    """The engine's end of the transport."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """Return the messages that are there, up to MAX_WEIGHT. Waits at most `timeout` seconds for the first one.

        The rest is returned by later calls. Steps run in between, so that a flood of prompts does not stop streams.
        """
        ...

    def send(self, message: FromEngine) -> None: ...


class BuiltEngine(NamedTuple):
    """A ready engine. `prepare` compiles a grammar in a thread. control: None if its weights cannot be changed.

    handover: None if the engine has no KV cache, or if the cache is on several hosts
    end: called when the engine stops because it was asked to
    late: the rest of the start; None: the start is complete
    discard: removes the stored programs that were loaded, and returns their names
    """

    core: EngineCore
    info: EngineInfo
    prepare: Prepare
    control: EngineControl | None = None
    handover: PageHandover | None = None
    end: Callable[[], None] = lambda: None
    late: LateStart | None = None
    discard: Callable[[], list[str]] = list

    def server(self, channel: Channel, state: SharedState, *, log_interval: float) -> EngineServer:
        """Return an EngineServer that runs it. Arguments: as of EngineServer"""
        return EngineServer(self, channel, state, log_interval=log_interval)


class EngineServer:
    """Runs an EngineCore until a Stop message comes. state: shared memory that the API process reads."""

    def __init__(self, built: BuiltEngine, channel: Channel, state: SharedState, *, log_interval: float = 10.0) -> None:
        core, info, self._prepare, control, handover, self._end, self._late, self._discard = built
        self._state = state
        self._record = WorkRecord(state)
        core.runner = RecordingRunner(core.runner, self._record)
        self._core = core
        self._info = info
        self._channel = channel
        self._stopping = False
        self._iterations = 0
        self._groups = OutputGroups()
        self._stats_sent = 0.0
        self._was_busy = False
        self._rebuilt: list[float] = []  # time.monotonic() of the latest rebuilds
        self._log = StatsLog(log_interval, info.num_pages, info.page_size, self._waiting_reasons)
        self._control = control
        self._handover = handover
        if control is not None:
            control.on_progress = self._tick

    def run(self) -> None:
        """Send the first stats and Ready, then run the loop until a Stop message comes."""
        # Sent before Ready, so that /metrics is already correct when /health turns 200.
        self._channel.send(Outputs([], self._stats()))
        self._channel.send(Ready(self._info))
        if self._late is not None:
            self._late.start()
        try:
            while not self._stopping:
                self._iterate()
            self._end()
        except Exception as error:
            if lacks_function(error) and (names := self._discard()):
                logger.error("a stored program cannot be run; the next process compiles %s", ", ".join(names))
            raise
        finally:
            self._core.close()

    def _tick(self) -> None:
        """Show that the loop makes progress."""
        self._iterations += 1
        self._state.count_iterations(self._iterations)

    def _iterate(self) -> None:
        refused = self._take_in(self._channel.receive(self._patience()))
        outputs = self._step()
        self._tick()
        self._publish(self._groups.take(refused + outputs), self._core.admitted)
        if self._late is not None:
            self._late.proceed()

    def _stats(self) -> EngineStats:
        stats = self._core.stats()
        if self._late is None:
            return stats
        return msgspec.structs.replace(stats, details=stats.details | self._late.stats())

    def _waiting_reasons(self) -> list[str]:
        return [request.reason for request in self._core.waiting()]

    def _take_in(self, messages: list[ToEngine]) -> list[TokenOutput]:
        """Handle messages. Returns the outputs of requests that they end."""
        new = [sibling.request_id for message in messages if isinstance(message, Add) for sibling in message.siblings]
        if new:
            self._record.taking_in([*self._core.compiling_ids, *new])
        ended = [output for message in messages for output in self._handle(message)]
        self._record.taking_in(self._core.compiling_ids)
        return ended

    def _step(self) -> list[TokenOutput]:
        try:
            return self._core.step()
        except StepError as error:
            self._rebuild(error)
            return []

    def _rebuild(self, error: StepError) -> None:
        """Continue after a failed step. Raises if rebuilding fails, or was tried too often, or if a program that was
        loaded cannot be run; then a new process is started.

        All failures during a search for the request that causes them count as one, or as none if it was found.
        """
        if lacks_function(error):
            raise error
        now = time.monotonic()
        if self._core.is_isolating:
            logger.error("a step failed again; the request that makes it fail is looked for: %s", error)
        else:
            self._rebuilt = [*(at for at in self._rebuilt if now - at < REBUILD_WINDOW), now]
            count = len(self._rebuilt)
            if count > MAX_REBUILDS:
                raise error
            logger.error("a step failed; rebuild %d of %d: %s", count, MAX_REBUILDS, error, exc_info=error.__cause__)
        if self._core.recover() and self._rebuilt:
            self._rebuilt.pop()
        logger.info("the cache is rebuilt in %.2f s; what was running is computed again", time.monotonic() - now)

    def _patience(self) -> float:
        """Return the seconds to wait for a message."""
        if self._core.has_work or (self._late is not None and self._late.has_work):
            return 0.0
        return COMPILE_WAIT if self._core.is_compiling else IDLE_WAIT

    def _handle(self, message: ToEngine) -> list[TokenOutput]:
        match message:
            case Add():
                return self._add(message)
            case Abort(request_ids):
                return self._core.abort(request_ids)
            case Call():
                answer = self._answer(message)
                if isinstance(message.call, LoadAdapter | UnloadAdapter):  # the caller sees it before its answer
                    self._channel.send(Outputs([], self._stats()))
                self._channel.send(answer)
            case Stop():
                self._stopping = True
        return []

    def _add(self, message: Add) -> list[TokenOutput]:
        requests = message.requests()
        try:
            self._core.add(*requests, prompt=message.token_ids, prepare=self._prepare)
        except HTTPError as error:
            return [_refusal(request.request_id, error) for request in requests]
        log_received(requests, len(message.token_ids))
        for request in requests:
            self._groups.watch(request)
        return []

    def _answer(self, message: Call) -> Reply:
        try:
            return Reply(message.call_id, result=self._carry_out(message.call))
        except JaxserveError as error:
            status = error.status if isinstance(error, HTTPError) else 400
            return Reply(message.call_id, error=str(error), status=status)

    def _carry_out(self, call: EngineCall | WorkerCall) -> Any:
        match call:
            case FlushCache():
                return self._core.flush_prefix_cache()
            case ListWaiting():
                return self._core.waiting()
            case WritePages() if self._handover is not None:
                return self._handover.write(call.path, call.token_ids, call.namespace)
            case ReadPages() if self._handover is not None:
                return self._handover.read(call.path, call.most)
            case _ if self._control is not None and isinstance(call, EngineCall):
                return self._control.carry_out(call)
            case _:
                raise InvalidValueError(f"this engine has no call {call.name!r}")

    def _publish(self, outputs: list[TokenOutput], admitted: list[str]) -> None:
        log_iteration(admitted, outputs)
        now = time.monotonic()
        busy = self._core.has_work or self._core.is_compiling
        due = now - self._stats_sent >= STATS_INTERVAL or (self._was_busy and not busy)
        self._was_busy = busy
        log = self._core.scheduler.kv.page_log
        pages = None if log is None else log.take()
        if outputs or admitted or due or pages:
            self._channel.send(Outputs(outputs, self._stats() if due else None, admitted, pages))
        if due:
            self._stats_sent = now
        self._log.update(self._core.stats, busy=busy, now=now)


def _refusal(request_id: str, error: HTTPError) -> TokenOutput:
    return TokenOutput(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        error=error.message,
        error_status=error.status,
        error_param=error.param,
    )
