"""`jaxserve launch --node-rank N` for N above 0: one host's part of an engine whose leader runs elsewhere.

Starts the engine process of this host, and starts it again when it ends: the group ends if any host is lost, and then
every host joins again. Serves /health and /live and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys

import uvloop
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from jaxserve.cli.serving.http_server import Server, http_config
from jaxserve.cli.serving.listening import bind, check_certificates, on_signals, url_of
from jaxserve.client.link import ProcessLink
from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.types.messages import Failed, Progress
from jaxserve.version import __version__

SERVING = "serving"  # the phase of a follower that makes the leader's calls
RESTART_DELAY = 1.0  # seconds
ENGINE_LOOK_INTERVAL = 1.0  # seconds
ENGINE_SILENCE_LIMIT = 30.0  # seconds without a heartbeat of the engine process after which it is killed

logger = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Follow until a signal and return the exit code. Raises ConfigError."""
    check_certificates(config.server)
    with bind(config.server) as listener:
        try:
            return uvloop.run(FollowerHost(config, listener).serve())
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while Python ends


class FollowerHost:
    """phase: what the engine process does, as /health shows it."""

    def __init__(self, config: Config, listener: socket.socket) -> None:
        self.phase = "starting"
        self._config = config
        self._listener = listener
        self._link = ProcessLink(config, "jaxserve.engine.follower_process")
        self._stop = asyncio.Event()
        self._signals = 0

    async def serve(self) -> int:
        """Serve /health and keep an engine process until a signal. Raises ConfigError."""
        on_signals(self._on_signal)
        server = Server(http_config(self._app(), self._config.server))
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        self._print_start()
        work = [asyncio.create_task(task) for task in (self._keep(), self._watch(), self._stop.wait())]
        try:
            await asyncio.wait([*work, http], return_when=asyncio.FIRST_COMPLETED)
            for task in (*work, http):
                if task.done():
                    task.result()
            return 0
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self._link.stop()
            server.should_exit = True
            await asyncio.gather(http, return_exceptions=True)

    def _print_start(self) -> None:
        mesh = self._config.mesh
        leader = f"{mesh.leader[0]}:{mesh.leader[1]}"
        print(
            f"jaxserve {__version__} is host {mesh.host_rank} of {mesh.hosts}; the leader is at {leader}; "
            f"health at {url_of(self._listener, self._config.server)}/health",
            file=sys.stderr,
            flush=True,
        )

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)

        @app.get("/health")
        def health() -> JSONResponse:
            return JSONResponse({"status": self.phase}, 200 if self.phase == SERVING else 503)

        @app.get("/live")
        def live() -> JSONResponse:
            return JSONResponse({"status": "alive"})

        return app

    async def _keep(self) -> None:
        """Run one engine process after the other. Raises ConfigError if one says that the operator is wrong."""
        while True:
            await self._link.start()
            with contextlib.suppress(EngineDeadError):
                while True:
                    self._take(await self._link.receive())
            self.phase = "restarting"
            logger.warning("the engine process of this host ended; it starts again and waits for the leader")
            await asyncio.sleep(RESTART_DELAY)

    def _take(self, message: object) -> None:
        match message:
            case Progress(phase):
                if phase != self.phase:
                    logger.info("host %d: %s", self._config.mesh.host_rank, phase)
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

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(130)  # the engine process ends too, because its stdin is closed
        self._stop.set()
