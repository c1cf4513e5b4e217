"""Supervises one engine behind a link: start, heartbeat, watchdog, restart with backoff, end.

The `Supervisor` owns the status that operators and /health see. It knows no requests. Callbacks report when the engine
is ready (the owner then sends live requests again, see sequence_sender.py), when it died, and when no other engine will
be started.

    loading -> ready -> restarting -> ready ...
       |          the process died, or one iteration of its loop exceeded the watchdog's limit
       +-> dead   the first start failed, or too many restarts in a row

While the server drains, the status is `draining` unless it is `dead`. The engine is still restarted.

The `Watchdog` measures how long an engine has made no progress, counting only time in which this process was running
itself. The counters are in shared memory, so no event loop is needed to receive them. If more than MAX_GAP passed
between two looks, this process was blocked or all processes were stopped. That time does not count, because a healthy
engine might not have run either.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from jaxserve.client.link import EngineLink
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.log import fields
from jaxserve.transport.shared_state import Pulse
from jaxserve.types.messages import EngineInfo, EngineState, Failed, FromEngine, Progress, Ready, RequestRefused

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.5  # seconds; as often as an engine's heartbeat
MAX_GAP = 2 * LOOK_INTERVAL


class Watchdog:
    """The seconds without progress: `silent` and `stuck`. The owner calls `look` every LOOK_INTERVAL."""

    def __init__(self) -> None:
        self.silent = 0.0  # without a heartbeat
        self.stuck = 0.0  # in one iteration of the engine loop
        self._pulse = Pulse(0, 0)
        self._looked = 0.0

    def start(self, now: float) -> None:
        """Reset for a new engine, or to give the same one another chance."""
        self.silent = self.stuck = 0.0
        self._looked = now

    def look(self, pulse: Pulse, now: float) -> None:
        gap = now - self._looked
        if gap > MAX_GAP:
            gap = 0.0
        last, self._pulse, self._looked = self._pulse, pulse, now
        self.silent = self.silent + gap if pulse.beats == last.beats else 0.0
        self.stuck = self.stuck + gap if pulse.iterations == last.iterations else 0.0


# seconds before each consecutive restart; after the last one the engine stays dead
RESTART_DELAYS = (0.0, 0.5, 2.0, 10.0, 30.0)
STABLE_AFTER = 300.0  # seconds of service after which the count of consecutive restarts is reset
HEARTBEAT_LIMIT = 3.0  # seconds without a heartbeat after which the engine is not alive; heartbeats come every 0.5 s
DUMP_TIME = 0.5  # seconds that the engine has to write its stacks before the watchdog kills it

Phase = Literal["loading", "ready", "restarting", "draining", "dead"]

# How a crash counts. counted: one more in a row. search: part of a search for the request that caused it, in which the
# engine served other requests. solved: the cause was found and removed, so the count starts again.
Death = Literal["counted", "search", "solved"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Status of the engine. `detail`, `done`, `total`, `unit` describe the progress of a start."""

    phase: Phase
    detail: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""


class Restarts:
    """Decides how long to wait before each of several consecutive restarts, and when to give up."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def next_delay(self, death: Death, served: float) -> float | None:
        """Return the seconds until the restart after a crash; None: give up.

        served: seconds for which the engine was ready
        """
        if death == "solved" or served > STABLE_AFTER:
            self.in_a_row = 0
        if death != "counted":
            return 0.0
        if self.in_a_row == len(RESTART_DELAYS):
            return None
        self.in_a_row += 1
        return RESTART_DELAYS[self.in_a_row - 1]


class Supervisor:
    """Keeps one engine running. Callbacks run on the event loop of `run`.

    on_message receives messages that are not for the supervisor. on_ready is called at each start. on_death is
    called with the reason when an engine that was ready dies, while the link still reports what it was computing.
    on_end is called when no other engine will be started.
    """

    def __init__(
        self,
        link: EngineLink,
        *,
        watchdog: float,
        on_message: Callable[[FromEngine | RequestRefused], None],
        on_ready: Callable[[EngineInfo], None],
        on_death: Callable[[EngineDeadError], Death],
        on_end: Callable[[EngineDeadError], None],
    ) -> None:
        self.status = EngineStatus("loading")
        self.failure: ConfigError | None = None  # the operator's mistake that made the first start fail
        self.restarts = 0
        self._link = link
        self._watchdog = watchdog
        self._on_message = on_message
        self._on_ready = on_ready
        self._on_death = on_death
        self._on_end = on_end
        self._was_ready = False  # at least once
        self._ready_since: float | None = None  # time.monotonic(); None: no engine is ready
        self._is_draining = False
        self._reason = ""  # why the last engine failed, in its own words
        self._row = Restarts()
        self._dog = Watchdog()
        self.changed = asyncio.Event()  # set and replaced at each change of status
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> bool:
        """Whether the engine is ready and its last heartbeat is at most HEARTBEAT_LIMIT old."""
        return self.status.phase == "ready" and self.beats

    @property
    def beats(self) -> bool:
        """Whether the last heartbeat of the engine is at most HEARTBEAT_LIMIT old."""
        return self._dog.silent < HEARTBEAT_LIMIT

    def drain(self) -> None:
        """Show the status `draining` from now on."""
        self._is_draining = True
        self._show(self.status)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.stop()
        self._show(EngineStatus("dead", "stopped"))

    def forget_restarts(self) -> None:
        """Count the next crash as the first in a row, because the engine serves requests."""
        self._row.in_a_row = 0

    def _show(self, status: EngineStatus) -> None:
        if self._is_draining and status.phase != "dead":
            status = replace(status, phase="draining")
        self.status = status
        changed = self.changed
        self.changed = asyncio.Event()
        changed.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._serve()
            except EngineDeadError as error:
                delay = self._died(error)
                if delay is None:
                    self._end(error)
                    return
                await asyncio.sleep(delay)
            except ConfigError as error:  # raised here while loading the tokenizer
                self.failure = error
                self._end(EngineDeadError(str(error)))
                return
            except Exception as error:
                logger.exception("the supervisor failed")
                self._end(EngineDeadError(f"{type(error).__name__}: {error}"))
                return

    async def _serve(self) -> None:
        """Run one engine from its start until it dies, which raises EngineDeadError."""
        self._reason = ""
        try:
            await self._link.start()
        except Exception as error:  # the system refuses a process or a folder; it may give them later
            if not self._was_ready:
                raise
            raise EngineDeadError(f"no engine process can be started: {error}") from error
        while True:
            self._handle(await self._link.receive())

    def _handle(self, message: FromEngine | EngineState | RequestRefused) -> None:
        match message:
            case Progress(phase, done, total, unit):
                name: Phase = "restarting" if self._was_ready else "loading"
                self._show(EngineStatus(name, phase, done, total, unit))
            case Failed():
                self._reason = message.message
                if message.expected and not self._was_ready:
                    self.failure = ConfigError(message.message, fix=message.fix)
            case EngineState(phase, detail):
                self._show(EngineStatus(phase, detail))
            case Ready(info):
                self._was_ready = True
                self._ready_since = time.monotonic()
                self._dog.start(self._ready_since)
                self._show(EngineStatus("ready"))
                self._on_ready(info)
            case _:
                self._on_message(message)

    def _died(self, error: EngineDeadError) -> float | None:
        """Return the seconds until the next start; None: there will be none."""
        if not self._was_ready:
            return None
        served = 0.0 if self._ready_since is None else time.monotonic() - self._ready_since
        self._ready_since = None
        delay = self._row.next_delay(self._on_death(error), served)
        if delay is not None:
            self.restarts += 1
            named = {"event": "engine_died", "restart": self.restarts, "delay": delay}
            logger.error("%s; restart %d in %.0f s", self._cause(error), self.restarts, delay, extra=fields(**named))
            self._show(EngineStatus("restarting", "the engine died"))
        return delay

    def _cause(self, error: EngineDeadError) -> str:
        return f"{error}: {self._reason}" if self._reason else str(error)

    def _end(self, error: EngineDeadError) -> None:
        detail = str(self.failure or self._cause(error))
        if self._row.in_a_row:
            detail = f"{detail}, after {self._row.in_a_row} restarts in a row"
        if self.failure is None:  # an operator's mistake is raised and logged once
            logger.error("the engine is dead: %s", detail)
        self._show(EngineStatus("dead", detail))
        self._on_end(EngineDeadError(f"the engine is dead: {detail}"))

    async def _watch(self) -> None:
        """Kill an engine that sends no heartbeat, or is stuck in one iteration, beyond the watchdog's limit."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            pulse = self._link.pulse()
            if self._ready_since is None or pulse is None:
                continue
            self._dog.look(pulse, time.monotonic())
            if max(self._dog.silent, self._dog.stuck) > self._watchdog:
                logger.error("the engine is stuck (%.0f s): killing it; its stacks follow", self._watchdog)
                since = self._ready_since
                self._link.dump_stacks()
                await asyncio.sleep(DUMP_TIME)
                if self._ready_since != since:  # it died by itself, and the link may have another engine
                    continue
                self._dog.start(time.monotonic())
                self._link.kill()
