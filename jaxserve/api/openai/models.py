"""Serve GET /v1/models and GET /v1/models/{id}, and build their objects."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.answers import Answer
from jaxserve.api.generate.wire import json_response
from jaxserve.api.openapi import documented
from jaxserve.api.state import ServerState, server_state
from jaxserve.types.messages import EngineInfo


class ModelAnswer(Answer):
    id: str
    object: str
    type: str  # from here on some fields are Anthropic's
    display_name: str
    created: int
    created_at: str
    lifecycle: str
    owned_by: str
    shutdown_date: None
    root: str
    parent: str | None  # of an adapter: the model
    max_model_len: int
    max_input_tokens: int
    task: str  # generate, embed or classify
    permission: list[Any]


class ModelList(Answer):
    object: str
    data: list[ModelAnswer]
    has_more: bool
    first_id: str
    last_id: str
    models: list[Any]


def named_object(name: str, created: int) -> dict[str, Any]:
    """Build the model object of OpenAI and Anthropic in one, with the fields that are known before the load."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "owned_by": "jaxserve",
    }


def model_object(name: str, info: EngineInfo, created: int) -> dict[str, Any]:
    """Build the model object with the fields that vLLM adds and the model's task."""
    return named_object(name, created) | {
        "shutdown_date": None,
        "root": info.model_path,
        "parent": None,
        "max_model_len": info.max_model_len,
        "max_input_tokens": info.max_model_len,
        "task": info.task,
        "permission": [],
    }


def model_list(data: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the list of OpenAI and Anthropic in one. data: at least one model object"""
    # Codex looks for `models`, its own form of a list. Without entries it keeps its own prompt and settings; an entry
    # that has no prompt would replace them.
    ends = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}  # Anthropic's
    return {"object": "list", "data": data, **ends, "models": []}


router = APIRouter()


@router.get("/v1/models", **documented(ModelList))
async def list_models(request: Request) -> Response:
    """List the names under which the model is served."""
    state = server_state(request)
    names = (*state.engine.info.served_names, *state.adapters)
    return json_response(model_list([_object(state, name) for name in names]))


@router.get("/v1/models/{model:path}", **documented(ModelAnswer))
async def retrieve_model(model: str, request: Request) -> Response:
    """Show one model by its name, which may contain slashes."""
    state = server_state(request)
    return json_response(_object(state, state.check_model(model)))


def _object(state: ServerState, name: str) -> dict[str, Any]:
    """Build the object of the model, or of an adapter: its root is its directory, and its parent the model."""
    found, served = model_object(name, state.engine.info, state.created), state.engine.info.served_names
    adapter = None if name in served else state.find_adapter(name)
    return found if adapter is None else found | {"root": adapter.path or name, "parent": served[0]}
