"""Answer the probes: GET /health, /live, /metrics and /health_generate.

The first three are answered in every phase without calling the engine. /health_generate calls it and checks that the
engine makes tokens, not only that its loop runs.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxserve.api.answers import Health
from jaxserve.api.generate.wire import json_response
from jaxserve.api.openapi import documented
from jaxserve.api.state import EngineProtocol, server_state
from jaxserve.errors import EngineDeadError, HTTPError, NotReadyError, QueueFullError
from jaxserve.telemetry.metrics import CONTENT_TYPE
from jaxserve.types.sampling import EMBED, SamplingParams

TIMEOUT = 20.0  # seconds; as in SGLang
PROBE_INTERVAL = 0.1
STATS_AGE = 1.0  # maximum age of the engine's counters, in seconds

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


async def check_generates(engine: EngineProtocol) -> None:
    """Return once the engine has answered a one-token request, or computed steps for other requests.

    Under load the probe's request waits, or the queue is full. A busy server is healthy.
    Raises NotReadyError (503) after TIMEOUT seconds, or the error with which the request ended.
    """
    started, steps = time.monotonic(), None
    probe = asyncio.create_task(_answer(engine))
    try:
        while (seconds := time.monotonic() - started) < TIMEOUT:
            await asyncio.wait({probe}, timeout=PROBE_INTERVAL)
            if probe.done():
                error = probe.exception()
                if error is None:
                    return
                if not isinstance(error, QueueFullError):
                    raise error
                await asyncio.sleep(PROBE_INTERVAL)
            if steps is None and seconds >= STATS_AGE:
                steps = engine.stats().steps
            elif steps is not None and engine.stats().steps > steps:
                return
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
    raise NotReadyError(f"The engine computed nothing for {TIMEOUT:g} seconds.")


async def _answer(engine: EngineProtocol) -> None:
    params = ONE_TOKEN if engine.info.task == "generate" else EMBED
    outputs = engine.generate([(engine.info.eos_token_ids or [0])[0]], params, deadline=TIMEOUT)
    async with aclosing(cast(Any, outputs)) as stream:
        async for _ in stream:
            pass


router = APIRouter()


@router.get("/health", **documented(Health))
async def health(request: Request) -> Response:
    """Return 200 while requests are accepted and an engine's loop runs; else 503 with the phase and its progress.

    `programs` shows how many are compiled. Before all are compiled, requests are served in larger programs.
    `engines` shows the state of each replica, if there are several. One replica that is alive is enough for 200.

    `store` shows whether files and batches can be written. Generation does not need it, so it does not change the
    status.
    Raises EngineDeadError if the engine's loop does not run.
    """
    state = server_state(request)
    engine, status = state.engine, state.engine.status
    progress = {"done": status.done, "total": status.total}
    report: dict[str, Any] = {"status": status.phase, "phase": status.detail, "progress": progress}
    if total := (details := engine.stats().details).get("programs_total"):
        report["programs"] = {"ready": int(details["programs_ready"]), "total": int(total)}
    if len(replicas := engine.replicas) > 1:
        report["engines"] = [
            {
                "engine": each.engine,
                "role": each.role,
                "status": each.status.phase,
                "phase": each.status.detail,
                "alive": each.alive,
            }
            for each in replicas
        ]
    if state.store is not None:
        report["store"] = asdict(state.store.condition)
    try:
        engine.check_ready()
        if not engine.alive:
            raise EngineDeadError("The engine's loop does not tick.")
    except HTTPError as error:
        response = json_response(report | error.body(), 503)
        response.headers["Retry-After"] = "1"
        return response
    return json_response(report)


@router.get("/health_generate", **documented())
async def health_generate(request: Request) -> Response:
    """Return 200 once the engine has made a token, for this probe or for other requests; 503 after 20 s without."""
    await check_generates(server_state(request).engine)
    return json_response({"status": "ready"})


@router.get("/live", **documented())
async def live() -> Response:
    """Return 200 as long as this process answers."""
    return json_response({"status": "live"})


@router.get("/metrics", response_class=PlainTextResponse)
@router.head("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    state = server_state(request)
    others = [] if state.peers is None else await state.peers.metrics()
    return Response(state.metrics.render(others), media_type=CONTENT_TYPE)
