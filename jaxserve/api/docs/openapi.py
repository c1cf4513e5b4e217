"""Build the OpenAPI document.

FastAPI cannot infer the models, since body.py parses bodies and responses are plain dicts. Routes declare both with
`documented`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jaxserve.api.protocol import answers

_REF = "#/components/schemas/{model}"


def documented(
    answer: type[BaseModel] = answers.Facts,
    *,
    body: type[BaseModel] | None = None,
    events: type[BaseModel] | None = None,
    many: bool = False,
    error: type[BaseModel] = answers.Error,
) -> dict[str, Any]:
    """Return keyword arguments for a route decorator.

    answer: model of a response of status 200; with `many`, a list of it is possible too
    events: model of the data of a stream's events
    error: model of the body of a 4xx or 5xx
    """
    shape = _schema(answer)
    whole = {"anyOf": [shape, {"type": "array", "items": shape}]} if many else shape
    content = {"application/json": {"schema": whole}}
    if events is not None:
        content["text/event-stream"] = {"schema": _schema(events)}
    extra: dict[str, Any] = {"responses": {"200": {"content": content}}}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(body)}}}
    return {"openapi_extra": extra, "responses": _errors(error)}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}


def _errors(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": _schema(model)}}
    return {
        "4XX": {"description": "An error in the request; the error names the field.", "content": content},
        "5XX": {"description": "A server error, or it is not ready (503, Retry-After).", "content": content},
    }


def install_openapi(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Build /openapi.json. models: bodies and answers that the routes declare"""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, models)
        return app.openapi_schema

    app.openapi = build


def _build(app: FastAPI, models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
    pairs = [(model, "validation") for model in models]
    _, schemas = models_json_schema(pairs, ref_template=_REF)  # type: ignore[arg-type]
    components = document.setdefault("components", {})
    components["schemas"] = schemas["$defs"]
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    return document
