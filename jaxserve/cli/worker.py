"""Serve HTTP on the main process's port as a worker: `python -m jaxserve.cli.worker`, which workers.py starts.

The worker reads its start as one line of JSON from stdin. Stdin stays open as long as the main process lives. When it
closes, the worker exits at once.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
from typing import Any

import msgspec
import uvloop
from fastapi import FastAPI

from jaxserve.api.app import check_chat_template, create_app, warm_up
from jaxserve.api.process_group import ProcessGroup
from jaxserve.api.state import ServerState
from jaxserve.cli.http_server import Server, http_config, keep_heap_small
from jaxserve.client.relay import RelayLink, WorkerEngine
from jaxserve.config import Config
from jaxserve.log import configure_logging
from jaxserve.telemetry.metrics import Families
from jaxserve.transport.child import end_with_parent
from jaxserve.transport.shared_state import SharedCounters
from jaxserve.types.calls import AbortRequests, Finish, IsAlive, Prepare, ReadMetrics

READY_INTERVAL = 0.01  # seconds between two checks whether the HTTP server has started


class WorkerStart(msgspec.Struct, frozen=True):
    """The first line that a worker reads.

    listener, relay, board: inherited descriptors
    config: JSON with secrets. board_shape: rows and columns. seed: seed of the random seeds of its requests
    """

    config: str
    row: int
    id_prefix: str
    listener: int
    relay: int
    board: int
    board_shape: tuple[int, int]
    main_socket: str
    encryption_key: bytes
    seed: int


_START = msgspec.json.Decoder(WorkerStart)


class Worker:
    """One run of a worker."""

    def __init__(self, start: WorkerStart, config: Config) -> None:
        group = ProcessGroup(
            SharedCounters(start.board, *start.board_shape), start.row, start.main_socket, start.encryption_key
        )
        methods = {
            IsAlive: lambda _: True,
            Prepare: lambda _: self._prepare(),
            AbortRequests: self._abort,
            ReadMetrics: lambda _: self._metrics(),
            Finish: lambda _: self._finish(),
        }
        link = RelayLink(socket.socket(fileno=start.relay), methods, on_end=lambda: os._exit(1))
        seeded = config.replace(runtime={"random_seed": start.seed})
        self._engine = WorkerEngine(seeded, link, id_prefix=start.id_prefix, whole_load=group.engine_load)
        self._listener = socket.socket(fileno=start.listener)
        self._app: FastAPI = create_app(self._engine, config, group=group)
        self._state: ServerState = self._app.state.server
        self._server = Server(http_config(self._app, config.server))

    async def serve(self) -> None:
        """Serve until the main process sends Finish."""
        await self._engine.start(wait=False)
        await self._server.serve(sockets=[self._listener])

    async def _prepare(self) -> None:
        """Return once requests are answered without delay. The engine must be ready."""
        await asyncio.to_thread(check_chat_template, self._app)
        await warm_up(self._app)
        while not self._server.started:
            await asyncio.sleep(READY_INTERVAL)
        gc.collect()
        gc.freeze()

    def _finish(self) -> None:
        self._server.should_exit = True

    def _abort(self, call: AbortRequests) -> list[str]:
        return self._state.live.abort(call.prefix, call.owner)

    def _metrics(self) -> Families:
        if self._engine.was_ready:
            self._state.metrics.model = self._engine.info.served_names[0]
        return self._state.metrics.families()


def main() -> None:
    """Serve as the worker that stdin's first line describes, until the main process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the main process handles them
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    start = _START.decode(sys.stdin.buffer.readline())
    end_with_parent()
    tree: dict[str, Any] = json.loads(start.config)
    config = Config.parse(tree)
    configure_logging(config.logging)
    keep_heap_small()
    uvloop.run(Worker(start, config).serve())
    sys.stderr.flush()
    os._exit(0)  # threads of the template and grammar workers may still wait


if __name__ == "__main__":
    main()
