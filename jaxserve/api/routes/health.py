"""GET /health, /live and /metrics: answered in every phase, without touching the engine. /health_generate uses it."""

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
    """200 while requests are taken and the engine's loop ticks; else 503 with the phase and its progress.

    `store` says whether files and batches can be written. Generation does not need it, so it changes no status code.
    """
    state = server_state(request)
    engine, status = state.engine, state.engine.status
    progress = {"done": status.done, "total": status.total}
    report: dict[str, Any] = {"status": status.phase, "phase": status.detail, "progress": progress}
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
    """200 once the engine has made one token for this probe, or computed others' meanwhile; 503 if not within 20 s."""
    await check_generates(server_state(request).engine)
    return json_response({"status": "ready"})


@router.get("/live", **documented())
async def live() -> Response:
    """200 as long as this process answers."""
    return json_response({"status": "live"})


@router.get("/metrics", response_class=PlainTextResponse)
@router.head("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(server_state(request).metrics.render(), media_type=CONTENT_TYPE)


@router.get("/", response_class=PlainTextResponse, include_in_schema=False)
@router.head("/", include_in_schema=False)
async def root() -> Response:
    """Probes of some clients and routers ask here first."""
    return PlainTextResponse("jaxserve is running. The API is under /v1, its description at /docs.\n")
