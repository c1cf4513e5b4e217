"""`jaxserve launch --node-rank N` for N above 0: one host's part of an engine whose leader runs elsewhere.

The process keeps the engine process of this host, and serves only /health and /live.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import uvloop
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from jaxserve.cli.http_server import Server, bind, check_certificates, http_config, on_signals, url_of
from jaxserve.client.link import SERVING, FollowerKeeper
from jaxserve.config import Config
from jaxserve.log import tell
from jaxserve.version import __version__


def serve(config: Config) -> int:
    """Follow until a signal and return the exit code. Raises ConfigError."""
    check_certificates(config.server)
    with bind(config.server) as listener:
        try:
            return uvloop.run(FollowerHost(config, listener).serve())
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while Python ends


class FollowerHost:
    """One run of a follower host's command."""

    def __init__(self, config: Config, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._keeper = FollowerKeeper(config)
        self._stop = asyncio.Event()
        self._signals = 0

    async def serve(self) -> int:
        """Serve /health and keep an engine process until a signal. Raises ConfigError."""
        on_signals(self._on_signal)
        server = Server(http_config(self._app(), self._config.server))
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        self._print_start()
        work = [asyncio.create_task(task) for task in (self._keeper.run(), self._stop.wait())]
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
            server.should_exit = True
            await asyncio.gather(http, return_exceptions=True)

    def _print_start(self) -> None:
        mesh = self._config.mesh
        leader = f"{mesh.leader[0]}:{mesh.leader[1]}"
        health = f"{url_of(self._listener, self._config.server)}/health"
        line = (
            f"jaxserve {__version__} is host {mesh.host_rank} of {mesh.hosts}; the leader is at {leader}; "
            f"health at {health}"
        )
        tell(line, text=line, event="start", version=__version__, host=mesh.host_rank, leader=leader, health=health)

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)

        @app.get("/health")
        def health() -> JSONResponse:
            phase = self._keeper.phase
            return JSONResponse({"status": phase}, 200 if phase == SERVING else 503)

        @app.get("/live")
        def live() -> JSONResponse:
            return JSONResponse({"status": "alive"})

        return app

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(130)  # this closes the engine process's stdin, so it ends too
        self._stop.set()
