"""Connect the batch runner of an application to its engine, store and routes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Mapping

from fastapi import FastAPI
from starlette.requests import Request

from jaxserve.api.batch.batch_request import engine_ready
from jaxserve.api.batch.job import BatchSettings
from jaxserve.api.batch.request_window import spare_slots
from jaxserve.api.batch.route_handler import Endpoint, route_handlers
from jaxserve.api.batch.runner import BatchRunner
from jaxserve.api.shared.body_cost import max_line_bytes
from jaxserve.api.shared.engine_protocol import EngineProtocol
from jaxserve.api.shared.state import ServerState
from jaxserve.errors import NotReadyError
from jaxserve.store import Store


def install_batches(app: FastAPI, state: ServerState, store: Store, endpoints: Mapping[str, Endpoint]) -> BatchRunner:
    """Create the runner of `app`, which runs within `batches_running`. endpoints: what batch requests may name."""
    settings = BatchSettings(
        known_model=lambda name: name in state.engine.info.served_names,
        ready=lambda: engine_ready(state.engine.check_ready),
        max_line_bytes=max_line_bytes(state.config.server),
    )
    runner = BatchRunner(
        store, route_handlers(app, endpoints), settings, functools.partial(request_limit, state.engine)
    )
    app.state.batches = runner
    state.metrics.watch_gauges(lambda: _gauges(runner))
    return runner


def _gauges(runner: BatchRunner) -> dict[str, float]:
    finished, requests = runner.progress()
    return {
        "jaxserve:store_writable": float(runner.store.condition.status == "ok"),
        "jaxserve:batches_running": float(runner.num_running()),
        "jaxserve:batches_paused": float(runner.num_paused()),
        "jaxserve:batches_requests": float(requests),
        "jaxserve:batches_requests_finished": float(finished),
    }


def request_limit(engine: EngineProtocol, running: int) -> int:
    """Return how many batch requests the engine has room for beside the current online requests."""
    try:
        rows = min(engine.info.max_num_seqs, engine.info.useful_rows)
    except NotReadyError:
        return 0
    return spare_slots(rows, max(0, engine.num_live - running))


@contextlib.asynccontextmanager
async def batches_running(app: FastAPI) -> AsyncIterator[None]:
    """Run the application's batches for as long as the context is open."""
    runner: BatchRunner = app.state.batches
    await runner.start()
    try:
        yield
    finally:
        await runner.stop()


def batch_runner(request: Request) -> BatchRunner:
    """Return the runner of the application that answers `request`."""
    return request.app.state.batches
