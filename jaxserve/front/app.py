"""Build the application in front of several models. It forwards each request to the process of the model it names.

It answers a few routes itself: probes, metrics, the lists of models, and loading and unloading.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import orjson
from fastapi import APIRouter, FastAPI
from prometheus_client import generate_latest
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from jaxserve.api import page
from jaxserve.api.body_cost import LONGEST_CONTEXT, BodyLimits, BodySum, is_large
from jaxserve.api.fields import Body
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import validated
from jaxserve.api.http.errors import ClientDisconnected, install_error_handlers
from jaxserve.api.http.forward import PeerEndedError, forward
from jaxserve.api.http.middleware import (
    ADMIN_PATHS,
    GENERATING_PATHS,
    UPLOAD_PATHS,
    Authentication,
    BodyLimit,
    RequestContext,
)
from jaxserve.api.http.sse import BegunAnswer, until_disconnect
from jaxserve.api.keys import KeyRing
from jaxserve.api.ollama.protocol import API_VERSION
from jaxserve.api.openai.models import model_list
from jaxserve.config import Config
from jaxserve.errors import ConflictError, InvalidValueError, ModelEndedError, ModelNotFoundError
from jaxserve.front.loaded_models import FrontModel, LoadedModels, with_latest
from jaxserve.telemetry.metrics import (
    CONTENT_TYPE,
    Families,
    FamilyCollector,
    MetricFamily,
    Metrics,
    merge_families,
    read_families,
)
from jaxserve.telemetry.tracing import NoTracing


class _NamesModel(msgspec.Struct):
    """A body of which only the model is read. Its other fields are skipped, not decoded."""

    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_NAMES_MODEL = msgspec.json.Decoder(_NamesModel)
_NAME = msgspec.json.Decoder(str | None)


async def choose(models: LoadedModels, request: Request, body: bytes, limits: BodyLimits) -> FrontModel | None:
    """Return the model that the body or the query names; None if neither names one.

    body: empty without a body, or if it is forwarded unread
    Raises InvalidValueError, ModelNotFoundError, and PayloadTooLargeError for a body that is costly to read.
    """
    named = None
    if body:
        read = (_model_of, body, limits, request.scope["path"])
        named = await asyncio.to_thread(*read) if is_large(body) else _model_of(*read[1:])
    in_query = request.query_params.get("model")
    if named is not None and in_query is not None and await models.find(named) is not await models.find(in_query):
        raise InvalidValueError("model: the body and the query name different models.", param="model")
    name = in_query if named is None else named
    return None if name is None else await models.find(name)


def _model_of(body: bytes, limits: BodyLimits, path: str) -> str | None:
    """Return the body's model; None if it has none. Raises InvalidValueError and PayloadTooLargeError."""
    limits.check_json(body, path)
    try:
        found = _NAMES_MODEL.decode(body).model
    except msgspec.ValidationError:
        raise InvalidValueError("body: should be an object", code="invalid_type") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValueError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    try:
        return None if isinstance(found, msgspec.UnsetType) else _NAME.decode(found)
    except msgspec.DecodeError:
        raise InvalidValueError("model: should be a string", param="model", code="invalid_type") from None


_LOADS_ADAPTER = frozenset({"/v1/load_lora_adapter", "/load_lora_adapter"})
_UNLOADS_ADAPTER = frozenset({"/v1/unload_lora_adapter", "/unload_lora_adapter"})


class _NamesAdapter(msgspec.Struct):
    """A body of which only the adapter's name is read."""

    lora_name: str


_NAMES_ADAPTER = msgspec.json.Decoder(_NamesAdapter)


async def choose_base(models: LoadedModels, named: FrontModel | None, path: str, body: bytes) -> FrontModel:
    """Return the model that loads or unloads an adapter: the named one, or the one that has it, or the default.

    Raises ConflictError for a load under a name of another model or of its adapter: a name is one model's.
    """
    try:
        name = _NAMES_ADAPTER.decode(body).lora_name
    except msgspec.DecodeError:
        return named or models.default  # its server says what is wrong with the body
    await models.refresh_adapters()
    has_it = next((each for each in models.all if name in each.plan.names or name in each.adapters), None)
    found = named or has_it or models.default
    if path in _LOADS_ADAPTER and has_it is not None and has_it is not found:
        owner = has_it.plan.name
        raise ConflictError(f"{name!r} is a name of the model {owner!r} or of its adapter", param="lora_name")
    return found


# an object of one of the models; its id does not say which model has it
_OBJECT = re.compile(r"(/v1)?/(files|batches|responses|conversations)/(?!input_tokens$)[^/]+(/.*)?")
_BELOW = ("/v1/", "/v2/", "/api/")
_OTHER_PATHS = frozenset(
    {
        *("/tokenize", "/detokenize", "/tokenizer_info", "/open_session", "/close_session", "/health_generate"),
        *("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/version"),
        *("/docs", "/redoc", "/openapi.json"),
    }
)
_PATHS = GENERATING_PATHS | ADMIN_PATHS | _OTHER_PATHS
_WRITTEN_HERE = frozenset({b"x-request-id", b"openai-processing-ms", b"request-id"})  # by RequestContext


class ForwardToModels:
    """ASGI application: every route that the front does not answer itself.

    A GET of a path that no model's server has is a 404 here. A probe or a browser that asks for such a path must not
    load a model, because another model might be unloaded for it.
    """

    def __init__(self, loaded_models: LoadedModels, limits: BodyLimits) -> None:
        self._loaded_models = loaded_models
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD") and not may_be_route(scope["path"]):
            raise HTTPException(404)
        request = Request(scope, receive)
        body = None if _is_upload(scope) else await _read(request)
        named = await choose(self._loaded_models, request, body or b"", self._limits)
        if scope["path"] in _LOADS_ADAPTER | _UNLOADS_ADAPTER:
            named = await choose_base(self._loaded_models, named, scope["path"], body or b"")
        wanted = [named or self._loaded_models.default]
        if named is None and body is not None and _OBJECT.fullmatch(scope["path"]):
            wanted = self._places(wanted[0])
        for model in wanted:
            answer = ForwardedAnswer(scope, send, hold_missing=model is not wanted[-1])
            await self._forward(model, request, answer, body)
            if not answer.is_missing:
                return

    def _places(self, default: FrontModel) -> list[FrontModel]:
        """Return the models that may have an object: the loaded models and the default model."""
        loaded = [each for each in self._loaded_models.all if each.state == "loaded"]
        return loaded if default in loaded else [*loaded, default]

    async def _forward(self, model: FrontModel, request: Request, answer: ForwardedAnswer, body: bytes | None) -> None:
        """Forward a request to a model's process.

        Raises ModelEndedError, NotReadyError or ClientDisconnected if nothing has been answered.
        """
        loaded = self._loaded_models.acquire(model)
        # waiting for a disconnect would lose a body that was not read
        is_quick = body is None or model.state == "loaded"
        process = await (loaded if is_quick else until_disconnect(request, loaded))
        try:
            await forward(process.socket, _with_id(request.scope), request.receive, answer.send, body)
        except PeerEndedError as error:
            await answer.end(ModelEndedError(f"The process of the model {model.plan.name!r} ended."), error)
        finally:
            self._loaded_models.release(model)


def may_be_route(path: str) -> bool:
    """Return whether a model's server may have a route of this path."""
    return path in _PATHS or path.startswith(_BELOW)


def _is_upload(scope: Scope) -> bool:
    return scope["method"] in ("POST", "PUT") and scope["path"].startswith(UPLOAD_PATHS)


async def _read(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientDisconnected from None


def _with_id(scope: Scope) -> Scope:
    """Return the scope with the request's id in its headers, so that both processes log the same id."""
    headers = [each for each in scope["headers"] if each[0] != b"x-request-id"]
    return {**scope, "headers": [*headers, (b"x-request-id", scope["state"]["request_id"].encode("latin-1"))]}


class ForwardedAnswer:
    """The answer of a model's process on its way to the client.

    hold_missing: whether to hold back a 404, because another model may have the object
    """

    def __init__(self, scope: Scope, send: Send, *, hold_missing: bool) -> None:
        self._begun = BegunAnswer(scope, send)
        self._hold_missing = hold_missing
        self.is_missing = False

    async def send(self, message: Message) -> None:
        """Send one ASGI message without the headers that this process writes itself, or hold it."""
        if message["type"] == "http.response.start":
            self.is_missing = self._hold_missing and message["status"] == 404
            message["headers"] = [each for each in message["headers"] if each[0].lower() not in _WRITTEN_HERE]
        if not self.is_missing:
            await self._begun.send(message)

    async def end(self, error: ModelEndedError, cause: PeerEndedError) -> None:
        """Send the error as an event of the stream. Raises the error if the answer has not begun."""
        if not cause.has_headers or self.is_missing:
            self.is_missing = False
            raise error
        await self._begun.end(error)


MODELS_ADMIN_PATHS = frozenset({"/models/load", "/models/unload"})

router = APIRouter()


class ModelName(Body):
    model: str = Field(description="Name of the model.")


def _loaded_models(request: Request) -> LoadedModels:
    return request.app.state.loaded_models


@router.get("/health")
async def health(request: Request) -> Response:
    """Return 200 once the models of the start are loaded or have failed, and until the server drains; else 503."""
    loaded_models = _loaded_models(request)
    phase = "draining" if loaded_models.draining else "ready" if loaded_models.started.is_set() else "loading"
    states = {each.plan.name: each.state for each in loaded_models.all}
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
    """List the names of all models, and of their adapters, with their states."""
    loaded_models = _loaded_models(request)
    await loaded_models.refresh_adapters()
    return json_response(model_list([entry for each in loaded_models.all for entry in each.listed()]))


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> Response:
    """Show one model or adapter by its name. Raises ModelNotFoundError."""
    found = (await _loaded_models(request).find(model)).entry(model)
    if found is None:
        raise ModelNotFoundError(f"The adapter {model!r} is not known until its model is loaded.", param="model")
    return json_response(found)


@router.get("/api/version")
@router.head("/api/version")
async def version() -> Response:
    """Show the version of Ollama whose API this is, as a model's server does, without loading a model."""
    return json_response({"version": API_VERSION})


@router.get("/api/tags")
@router.head("/api/tags")
async def tags(request: Request) -> Response:
    """List all models in Ollama's form. A model that is not loaded has only its names."""
    loaded_models = _loaded_models(request)
    found = await _models_below(loaded_models, "/api/tags")
    known = {model["name"] for model in found}
    names = [entry["id"] for each in loaded_models.all for entry in each.listed()]
    unloaded = [name for name in names if name not in known]
    return json_response({"models": [*found, *({"name": name, "model": name} for name in unloaded)]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """List the loaded models in Ollama's form."""
    return json_response({"models": await _models_below(_loaded_models(request), "/api/ps")})


async def _models_below(loaded_models: LoadedModels, path: str) -> list[dict[str, Any]]:
    """Return the `models` that the loaded models' servers list. A server that does not answer is left out."""
    answers = await asyncio.gather(*(process.ask(path) for _, process in loaded_models.loaded_processes()))
    return [model for status, body in answers if status == 200 for model in orjson.loads(body)["models"]]


@router.post("/models/load")
async def load(request: Request) -> Response:
    """Start to load a model. Returns at once; GET /v1/models shows when it is loaded. Raises NotReadyError."""
    model = await _named(request)
    _loaded_models(request).load(model)
    return _state(model)


@router.post("/models/unload")
async def unload(request: Request) -> Response:
    """Start to unload a model. Its requests end first. New requests wait and load it again."""
    model = await _named(request)
    _loaded_models(request).unload(model)
    return _state(model)


async def _named(request: Request) -> FrontModel:
    """Return the model that the body names; an adapter is none. Raises RequestError."""
    try:
        body, _ = validated(await request.body(), ModelName)
    except ClientDisconnect:
        raise ClientDisconnected from None
    found = await _loaded_models(request).find(body.model)
    if not any(each in found.plan.names for each in with_latest(body.model)):
        raise InvalidValueError(f"{body.model!r} is an adapter of {found.plan.name!r}.", param="model")
    return found


def _state(model: FrontModel) -> Response:
    return json_response({"success": True, "model": model.plan.name, "status": {"value": model.state}})


def create_front(loaded_models: LoadedModels, config: Config) -> FastAPI:
    """Build the application. The caller runs and stops `loaded_models`."""
    limits = BodyLimits.of(config.server, LONGEST_CONTEXT)
    metrics = FrontMetrics(loaded_models)
    app = FastAPI(
        middleware=_middleware(config, limits, metrics.own),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.loaded_models = loaded_models
    app.state.metrics = metrics
    install_error_handlers(app)
    app.include_router(router)
    app.include_router(page.router)
    app.router.default = ForwardToModels(loaded_models, limits)
    return app


def _middleware(config: Config, limits: BodyLimits, metrics: Metrics) -> list[Middleware]:
    """List the middleware, outermost first: as in a server of one model, but without the readiness gate."""
    section, key_ring = config.server, KeyRing(config.server)
    chain = [
        Middleware(RequestContext, metrics=metrics, tracing=NoTracing(), log_requests=config.logging.requests),
        Middleware(
            Authentication,
            keys=lambda: key_ring,
            metrics_auth=section.metrics_auth,
            more_admin_paths=MODELS_ADMIN_PATHS,
        ),
        Middleware(BodyLimit, limits=lambda: limits, held=BodySum([0.0]), timeout=section.body_timeout),
    ]
    if section.cors_origins:
        headers = {"allow_origins": section.cors_origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        chain.insert(0, Middleware(CORSMiddleware, **headers))
    return chain


class FrontMetrics:
    """The metrics of all loaded models, each with the label `model`, and of the front's own process."""

    def __init__(self, loaded_models: LoadedModels) -> None:
        self.own = Metrics()
        self._loaded_models = loaded_models

    async def render(self) -> bytes:
        """Return the metrics in Prometheus' text format. A model that does not answer is left out."""
        own: Families = [each for each in read_families(self.own.registry) if each["name"].startswith("process_")]
        loaded = [(name, process.metrics()) for name, process in self._loaded_models.loaded_processes()]
        found = await asyncio.gather(*(reading for _, reading in loaded))
        models = [_labelled(families, name) for families, (name, _) in zip(found, loaded, strict=True)]
        return generate_latest(FamilyCollector(merge_families([[*own, self._loaded()], *models])))

    def _loaded(self) -> MetricFamily:
        name = "jaxserve:model_loaded"
        samples: list[Any] = [
            (name, dict.fromkeys(("model", "model_name"), each.plan.name), float(each.state == "loaded"))
            for each in self._loaded_models.all
        ]
        return {"name": name, "kind": "gauge", "text": "whether the model is loaded", "samples": samples}


def _labelled(families: Families, model: str) -> Families:
    return [
        {**family, "samples": [(name, {**labels, "model": model}, value) for name, labels, value in family["samples"]]}
        for family in families
    ]
