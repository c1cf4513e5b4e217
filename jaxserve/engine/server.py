"""The engine's own loop: messages in, steps, outputs back. The same loop runs in a child process and in a thread.

Knows EngineCore and a Channel; knows no socket, no text and no HTTP. One request's error ends that request only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxserve.engine.compiling import Prepare
from jaxserve.engine.core import EngineCore, StepError
from jaxserve.engine.output_groups import OutputGroups
from jaxserve.engine.request_log import log_received, log_turn
from jaxserve.engine.stats_log import StatsLog
from jaxserve.errors import HTTPError, JaxserveError
from jaxserve.transport.shared_state import SharedState
from jaxserve.transport.work_record import RecordingRunner, WorkRecord
from jaxserve.types.messages import Abort, Add, Call, EngineInfo, FromEngine, Outputs, Ready, Reply, Stop, ToEngine
from jaxserve.types.output import FinishReason, TokenOutput

STATS_INTERVAL = 0.25  # seconds between two stats of a busy engine; a frame of stats costs about 20 us
IDLE_WAIT = 1.0  # seconds an idle loop sleeps at most, so that stats and deadlines move on
MAX_REBUILDS = 3  # failed steps within REBUILD_WINDOW that are answered by a rebuild; one more ends the process
REBUILD_WINDOW = 600.0  # seconds
MAX_WAITING_SHOWN = 1024  # waiting requests whose reasons are shown; 2 us each
COMPILE_WAIT = 0.002  # seconds between two looks at grammars that are being compiled, when nothing else runs

logger = logging.getLogger(__name__)


class Channel(Protocol):
    """The engine's end of the wire."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """The messages that are there, up to MAX_WEIGHT of them; waits at most `timeout` seconds for the first one.

        What is left over comes at the next call: a step runs in between, so that no flood of prompts stops streams.
        """
        ...

    def send(self, message: FromEngine) -> None: ...


class BuiltEngine(NamedTuple):
    """An engine that is ready to run. `prepare` compiles a grammar in a thread."""

    core: EngineCore
    info: EngineInfo
    prepare: Prepare


Build = Callable[[Channel], BuiltEngine]


class EngineServer:
    """Runs an EngineCore until it is told to stop. state: what it leaves for the other end of the channel."""

    def __init__(self, built: BuiltEngine, channel: Channel, state: SharedState, *, log_interval: float = 10.0) -> None:
        core, info, self._prepare = built
        self._state = state
        self._record = WorkRecord(state)
        core.runner = RecordingRunner(core.runner, self._record)
        self._core = core
        self._info = info
        self._channel = channel
        self._stopping = False
        self._groups = OutputGroups()
        self._stats_sent = 0.0
        self._was_busy = False
        self._rebuilt: list[float] = []  # times of the latest rebuilds, time.monotonic()
        self._log = StatsLog(log_interval, info.num_pages, info.page_size, self._waiting_reasons)
        self._calls: dict[str, Callable[..., Any]] = {
            "flush_cache": core.flush_prefix_cache,
            "waiting": lambda: core.waiting(MAX_WAITING_SHOWN),
        }

    def run(self) -> None:
        self._channel.send(Outputs([], self._core.stats()))  # before Ready: who is told so finds true gauges
        self._channel.send(Ready(self._info))
        turns = 0
        try:
            while not self._stopping:
                turns += 1
                self._turn(turns)
        finally:
            self._core.close()

    def _turn(self, number: int) -> None:
        refused = self._take_in(self._channel.receive(self._patience()))
        outputs = self._step()
        self._state.turn(number)
        self._publish(self._groups.take(refused + outputs), self._core.admitted)

    def _waiting_reasons(self) -> list[str]:
        return [request.reason for request in self._core.waiting(MAX_WAITING_SHOWN)]

    def _take_in(self, messages: list[ToEngine]) -> list[TokenOutput]:
        """Handle messages; the outputs of requests that end by it."""
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
        """Go on after a failed step. Raises where that has been tried too often, or fails: a new process is next.

        The failures of a search for the request that causes them count as one, and as none once it is found.
        """
        now = time.monotonic()
        if self._core.is_searching:
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
        """Seconds to wait for a message."""
        if self._core.has_work:
            return 0.0
        return COMPILE_WAIT if self._core.is_compiling else IDLE_WAIT

    def _handle(self, message: ToEngine) -> list[TokenOutput]:
        match message:
            case Add():
                return self._add(message)
            case Abort(request_ids):
                return self._core.abort(request_ids)
            case Call():
                self._channel.send(self._call(message))
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

    def _call(self, call: Call) -> Reply:
        method = self._calls.get(call.method)
        if method is None:
            return Reply(call.call_id, error=f"no method {call.method!r}")
        try:
            return Reply(call.call_id, result=method(**call.args))
        except (JaxserveError, TypeError) as error:
            return Reply(call.call_id, error=str(error))

    def _publish(self, outputs: list[TokenOutput], admitted: list[str]) -> None:
        log_turn(admitted, outputs)
        now = time.monotonic()
        busy = self._core.has_work or self._core.is_compiling
        due = now - self._stats_sent >= STATS_INTERVAL or (self._was_busy and not busy)
        self._was_busy = busy
        if outputs or admitted or due:
            self._channel.send(Outputs(outputs, self._core.stats() if due else None, admitted))
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
