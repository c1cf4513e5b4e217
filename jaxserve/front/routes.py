"""The routes that the front answers itself: its health, its metrics, its models, and the loads that an operator asks
for."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from jaxserve.api.fields import Body
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import validated
from jaxserve.api.http.errors import ClientDisconnected
from jaxserve.api.ollama.protocol import API_VERSION
from jaxserve.api.openai.models import model_list
from jaxserve.front.resident import Resident
from jaxserve.front.residents import Residents
from jaxserve.telemetry.metrics import CONTENT_TYPE

MODELS_ADMIN_PATHS = frozenset({"/models/load", "/models/unload"})

router = APIRouter()


class ModelName(Body):
    model: str = Field(description="Name of the model.")


def _residents(request: Request) -> Residents:
    return request.app.state.residents


@router.get("/health")
async def health(request: Request) -> Response:
    """Return 200 once the models of the start are loaded or have failed, and until the server drains; else 503."""
    residents = _residents(request)
    phase = "draining" if residents.draining else "ready" if residents.started.is_set() else "loading"
    states = {each.plan.name: each.state for each in residents.all}
    headers = {} if phase == "ready" else {"Retry-After": "1"}
    response = json_response({"status": phase, "models": states}, 200 if phase == "ready" else 503)
    response.headers.update(headers)
    return response


@router.get("/live")
async def live() -> Response:
    """Return 200 as long as this process answers."""
    return json_response({"status": "live"})


@router.get("/metrics", response_class=PlainTextResponse)
@router.head("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of all loaded models, with the label `model`, in Prometheus' text format."""
    return Response(await request.app.state.metrics.render(), media_type=CONTENT_TYPE)


@router.get("/v1/models")
@router.get("/models")
async def list_models(request: Request) -> Response:
    """List the names of all models with their states."""
    return json_response(model_list([entry for each in _residents(request).all for entry in each.listed()]))


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> Response:
    """Show one model by its name. Raises ModelNotFoundError."""
    residents = _residents(request)
    entries = residents.of(residents.catalog.find(model)).listed()
    return json_response(next((each for each in entries if each["id"] == model), entries[0]))


@router.get("/api/version")
@router.head("/api/version")
async def version() -> Response:
    """Show the version of Ollama whose API this is, as a model's server does, but load no model for it."""
    return json_response({"version": API_VERSION})


@router.get("/api/tags")
@router.head("/api/tags")
async def tags(request: Request) -> Response:
    """List all models in Ollama's form; of a model that is not loaded, its names only."""
    residents = _residents(request)
    found = await _models_below(residents, "/api/tags")
    known = {model["name"] for model in found}
    unloaded = [name for each in residents.all for name in each.plan.names if name not in known]
    return json_response({"models": [*found, *({"name": name, "model": name} for name in unloaded)]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """List the loaded models in Ollama's form."""
    return json_response({"models": await _models_below(_residents(request), "/api/ps")})


async def _models_below(residents: Residents, path: str) -> list[dict[str, Any]]:
    """Return the `models` that the loaded models' servers list. One that does not answer is left out."""
    answers = await asyncio.gather(*(process.ask(path) for _, process in residents.loaded_processes()))
    return [model for status, body in answers if status == 200 for model in orjson.loads(body)["models"]]


@router.post("/models/load")
async def load(request: Request) -> Response:
    """Start to load a model. Returns at once; GET /v1/models shows when it is loaded. Raises NotReadyError."""
    resident = await _named(request)
    _residents(request).load(resident)
    return _state(resident)


@router.post("/models/unload")
async def unload(request: Request) -> Response:
    """Start to unload a model. Its requests end first; new ones wait, and load it again."""
    resident = await _named(request)
    _residents(request).unload(resident)
    return _state(resident)


async def _named(request: Request) -> Resident:
    """Return the model that the body names. Raises RequestError."""
    try:
        body, _ = validated(await request.body(), ModelName)
    except ClientDisconnect:
        raise ClientDisconnected from None
    residents = _residents(request)
    return residents.of(residents.catalog.find(body.model))


def _state(resident: Resident) -> Response:
    return json_response({"success": True, "model": resident.plan.name, "status": {"value": resident.state}})
