"""Keeps the engine process of a host whose leader runs elsewhere.

The group ends if any host is lost, and then every host joins again: the process is started again when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from jaxserve.client.processes.link import ProcessLink
from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.types.messages import Failed, Progress

SERVING = "serving"  # the phase of a follower that makes the leader's calls
RESTART_DELAY = 1.0  # seconds
ENGINE_LOOK_INTERVAL = 1.0  # seconds
ENGINE_SILENCE_LIMIT = 30.0  # seconds without a heartbeat of the engine process after which it is killed

logger = logging.getLogger(__name__)


class FollowerKeeper:
    """Starts the engine process of this host, again and again.

    config: with this host's rank and the leader's address. phase: what the engine process does
    """

    def __init__(self, config: Config) -> None:
        self.phase = "starting"
        self._rank = config.mesh.host_rank
        self._link = ProcessLink(config, "jaxserve.engine.hosts.follower_process")

    async def run(self) -> None:
        """Keep an engine process until cancelled, then end it. Raises ConfigError if one says that the operator is
        wrong.
        """
        work = [asyncio.create_task(task) for task in (self._keep(), self._watch())]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self._link.stop()

    async def _keep(self) -> None:
        """Run one engine process after the other. Raises ConfigError."""
        await self._link.start()
        while True:
            with contextlib.suppress(EngineDeadError):
                while True:
                    self._take(await self._link.receive())
            self.phase = "restarting"
            logger.warning("the engine process of this host ended; it starts again and waits for the leader")
            await asyncio.sleep(RESTART_DELAY)
            await self._start_again()

    async def _start_again(self) -> None:
        """Start an engine process as soon as the system has a process and a folder for it."""
        while True:
            try:
                return await self._link.start()
            except (OSError, ConfigError) as error:
                logger.error("no engine process can be started: %s", error)
            await asyncio.sleep(RESTART_DELAY)

    def _take(self, message: object) -> None:
        match message:
            case Progress(phase):
                if phase != self.phase:
                    logger.info("host %d: %s", self._rank, phase)
                self.phase = phase
            case Failed(reason, fix, expected):
                if expected:
                    raise ConfigError(reason, fix=fix)

    async def _watch(self) -> None:
        """Kill an engine process that is stopped. The leader cannot: it may be on another machine."""
        seen, since = None, 0.0
        while True:
            await asyncio.sleep(ENGINE_LOOK_INTERVAL)
            pulse, now = self._link.pulse(), asyncio.get_running_loop().time()
            if pulse != seen or self.phase != SERVING:
                seen, since = pulse, now
            elif now - since > ENGINE_SILENCE_LIMIT:
                logger.error("the engine process shows no sign of life: killing it")
                self._link.kill()
