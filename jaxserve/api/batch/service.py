"""The batches of one application: the runner put together from the engine, the store and the routes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.requests import Request

from jaxserve.api.batch.job import BatchSettings
from jaxserve.api.batch.lines import engine_ready
from jaxserve.api.batch.route_handler import route_handlers
from jaxserve.api.batch.runner import BatchRunner
from jaxserve.api.batch.window import spare_slots
from jaxserve.api.engine_protocol import EngineProtocol
from jaxserve.api.state import ServerState
from jaxserve.config import Config
from jaxserve.errors import NotReadyError
from jaxserve.store import Store

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")  # routes whose lines batches may hold


def install_batches(app: FastAPI, state: ServerState, store: Store) -> BatchRunner:
    """Make the runner of `app`. It works between `start` and `stop`: see `running`."""

    def known_model(name: str) -> bool:
        return name in served_names(state.engine, state.config)

    settings = BatchSettings(
        known_model=known_model,
        ready=lambda: engine_ready(state.engine.check_ready),
        max_line_bytes=state.config.server.max_body_bytes,
    )
    runner = BatchRunner(store, route_handlers(app, ENDPOINTS), settings, lambda lines: line_limit(state, lines))
    app.state.batches = runner
    return runner


def served_names(engine: EngineProtocol, config: Config) -> list[str]:
    return engine.info.served_names


def line_limit(state: ServerState, lines: int) -> int:
    """Lines that the engine has room for beside the online requests of this moment."""
    try:
        info, stats = state.engine.info, state.engine.stats()
    except NotReadyError:
        return 0
    return spare_slots(info.max_num_seqs, max(0, state.live.count - lines), stats.num_waiting, lines)


@contextlib.asynccontextmanager
async def running(runner: BatchRunner) -> AsyncIterator[None]:
    await runner.start()
    try:
        yield
    finally:
        await runner.stop()


def batch_runner(request: Request) -> BatchRunner:
    """The runner of the application that answers `request`."""
    return request.app.state.batches
