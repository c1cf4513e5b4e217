"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.protocol.models import ModelAnswer, ModelList, model_list, model_object
from jaxserve.api.respond.wire import json_response
from jaxserve.api.shared.state import server_state

router = APIRouter()


@router.get("/v1/models", **documented(ModelList))
async def list_models(request: Request) -> Response:
    """List the names under which the model is served."""
    state = server_state(request)
    info = state.engine.info
    return json_response(model_list([model_object(name, info, state.created) for name in info.served_names]))


@router.get("/v1/models/{model:path}", **documented(ModelAnswer))
async def retrieve_model(model: str, request: Request) -> Response:
    """Show one model by its name, which may contain slashes."""
    state = server_state(request)
    return json_response(model_object(state.check_model(model), state.engine.info, state.created))
