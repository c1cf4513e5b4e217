"""The life of one engine behind a link: start, heartbeat, watchdog, restart with backoff, end.

Owns the status that operators and /health see. Knows nothing of requests: its owner is told when the engine is
ready (and sends again what was live) and when it is dead for good.

    loading -> ready -> restarting -> ready ...        -> draining -> dead
       |          a death, or a turn longer than the watchdog's limit
       +-> dead   when the first start fails, or when restarts in a row run out
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxserve.engine.link import EngineLink
from jaxserve.engine.messages import Beat, EngineInfo, Failed, FromEngine, Progress, Ready
from jaxserve.errors import ConfigError, EngineDeadError

RESTART_DELAYS = (0.0, 0.5, 2.0, 10.0, 30.0)  # seconds before each restart in a row; then the engine stays dead
STABLE_AFTER = 300.0  # seconds of service after which the restarts in a row are forgotten
HEARTBEAT_LIMIT = 3.0  # seconds without a beat after which the engine does not count as alive; beats come every 0.5
DUMP_TIME = 0.5  # seconds the engine is given to write its stacks before the watchdog kills it

logger = logging.getLogger(__name__)

Phase = Literal["loading", "ready", "restarting", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Where the engine is. `detail`, `done`, `total`, `unit` tell the progress of a start."""

    phase: Phase
    detail: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""


class Supervisor:
    """Keeps one engine running. Callbacks run on the event loop that `run` runs on.

    on_message gets what is not the supervisor's own; on_ready is called at every start; on_death with the reason
    when an engine died and another will be started; on_end when none will.
    """

    def __init__(
        self,
        link: EngineLink,
        *,
        watchdog: float,
        on_message: Callable[[FromEngine], None],
        on_ready: Callable[[EngineInfo], None],
        on_death: Callable[[EngineDeadError], None],
        on_end: Callable[[EngineDeadError], None],
    ) -> None:
        self.status = EngineStatus("loading")
        self.failure: ConfigError | None = None  # why a start failed
        self.restarts = 0
        self._link = link
        self._watchdog = watchdog
        self._on_message = on_message
        self._on_ready = on_ready
        self._on_death = on_death
        self._on_end = on_end
        self._was_ready = False
        self._last_beat = 0.0
        self._busy_seconds = 0.0
        self._changed = asyncio.Event()  # set and replaced at every change of status
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> bool:
        """The engine is ready and beat within the last seconds."""
        return self.status.phase == "ready" and self._silence() < HEARTBEAT_LIMIT

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.stop()
        self.set_status(EngineStatus("dead", "stopped"))

    async def next_status(self) -> EngineStatus:
        """The status after its next change."""
        await self._changed.wait()
        return self.status

    def set_status(self, status: EngineStatus) -> None:
        self.status = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _silence(self) -> float:
        """Seconds since the last beat; 0 for an engine in a thread, which lives and dies with us."""
        return time.monotonic() - self._last_beat if self._link.beats else 0.0

    async def _run(self) -> None:
        delays = iter(RESTART_DELAYS)
        while True:
            started = time.monotonic()
            try:
                await self._serve()
            except EngineDeadError as error:
                if time.monotonic() - started > STABLE_AFTER:
                    delays = iter(RESTART_DELAYS)
                delay = next(delays, None)
                if delay is None or not self._was_ready:
                    self._end(error)
                    return
                self._died(error, delay)
                await asyncio.sleep(delay)
            except ConfigError as error:  # of what this process loads itself: the tokenizer
                self.failure = error
                self._end(EngineDeadError(str(error)))
                return
            except Exception as error:
                logger.exception("the supervisor failed")
                self._end(EngineDeadError(f"{type(error).__name__}: {error}"))
                return

    async def _serve(self) -> None:
        """One engine from its start to its death, which is an EngineDeadError."""
        await self._link.start()
        while True:
            self._handle(await self._link.receive())

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Beat():
                self._last_beat = time.monotonic()
                self._busy_seconds = message.busy_seconds
            case Progress(phase, done, total, unit):
                name: Phase = "restarting" if self._was_ready else "loading"
                self.set_status(EngineStatus(name, phase, done, total, unit))
            case Failed():
                self.failure = ConfigError(message.message, fix=message.fix)
            case Ready(info):
                self._was_ready = True
                self._last_beat, self._busy_seconds = time.monotonic(), 0.0
                self.set_status(EngineStatus("ready"))
                self._on_ready(info)
            case _:
                self._on_message(message)

    def _died(self, error: EngineDeadError, delay: float) -> None:
        self.restarts += 1
        logger.error("%s; restart %d in %.0f s", error, self.restarts, delay)
        self.set_status(EngineStatus("restarting", "the engine died"))
        self._on_death(error)

    def _end(self, error: EngineDeadError) -> None:
        detail = str(self.failure or error)
        logger.error("the engine is dead: %s", detail)
        self.set_status(EngineStatus("dead", detail))
        self._on_end(EngineDeadError(f"the engine is dead: {detail}"))

    async def _watch(self) -> None:
        """Kill an engine that is silent, or stuck in one turn, for longer than the watchdog's limit."""
        while True:
            await asyncio.sleep(HEARTBEAT_LIMIT / 6)
            if self.status.phase == "ready" and max(self._silence(), self._busy_seconds) > self._watchdog:
                logger.error("the engine is stuck (%.0f s): killing it; its stacks follow", self._watchdog)
                self._link.dump_stacks()
                await asyncio.sleep(DUMP_TIME)
                self._busy_seconds, self._last_beat = 0.0, time.monotonic()
                self._link.kill()
