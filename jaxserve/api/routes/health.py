"""GET /health, /live and /metrics: answered in every phase without calling the engine. /health_generate does call
it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.protocol.answers import Health
from jaxserve.api.respond.wire import json_response
from jaxserve.api.shared.probe import check_generates
from jaxserve.api.shared.state import server_state
from jaxserve.errors import EngineDeadError, HTTPError
from jaxserve.telemetry.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/health", **documented(Health))
async def health(request: Request) -> Response:
    """Return 200 while requests are accepted and an engine's loop runs; else 503 with the phase and its progress.

    `programs` shows how many are compiled. Requests are served, in larger programs, before all are.
    `engines` shows the state of each replica, if there are several. One that is alive is enough for 200.

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
