"""Build the HTTP application: routes, middleware and error handlers around one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Lifespan

from jaxserve.api import health, page
from jaxserve.api.anthropic import routes as anthropic
from jaxserve.api.batch.runner import batches_running, install_batches
from jaxserve.api.encryption import Encryption, encryption_key
from jaxserve.api.http.errors import install_error_handlers
from jaxserve.api.http.forward import ForwardToMain
from jaxserve.api.http.middleware import Authentication, BodyLimit, ReadinessGate, RequestContext
from jaxserve.api.ollama import routes as ollama
from jaxserve.api.openai import batches, embeddings, files, models
from jaxserve.api.openai import routes as openai
from jaxserve.api.openai.files import no_store_router
from jaxserve.api.openapi import install_docs, install_openapi
from jaxserve.api.process_group import ProcessGroup
from jaxserve.api.responses import routes as responses
from jaxserve.api.responses import stored_routes as stored_responses
from jaxserve.api.responses.background import install_responses, responses_running
from jaxserve.api.schemas import ANSWERS, BODIES
from jaxserve.api.scoring import routes as scoring
from jaxserve.api.sglang import adapters, weights
from jaxserve.api.sglang import routes as sglang
from jaxserve.api.state import EngineProtocol, ServerState, check_pictures, check_template, check_vocabulary
from jaxserve.config import Config
from jaxserve.errors import ConfigError, NotReadyError
from jaxserve.store import Store
from jaxserve.telemetry.engine_collector import EngineReading
from jaxserve.telemetry.metrics import Metrics
from jaxserve.telemetry.tracing import make_tracing
from jaxserve.text.output_parser import choose_parsers
from jaxserve.types.messages import EngineStats
from jaxserve.version import __version__

STORE_ROUTERS = (files, batches, stored_responses)
ROUTERS = (health, page, models, openai, responses, anthropic, ollama, embeddings, scoring, sglang, weights, adapters)

BATCH_ENDPOINTS = {
    "/v1/chat/completions": openai.create_chat_completion,
    "/v1/completions": openai.create_completion,
    "/v1/embeddings": embeddings.create_embedding,
    "/v1/responses": responses.create_response,
}


def create_app(
    engine: EngineProtocol,
    config: Config,
    metrics: Metrics | None = None,
    store: Store | None = None,
    no_store: str = "This server was started without a store.",
    group: ProcessGroup | None = None,
) -> FastAPI:
    """Build the application around one engine, which may still be loading.

    The caller starts and stops the engine and the store. Without a store, the routes of files, batches and stored
    objects answer 503 with the message `no_store`. A worker of `group` answers requests that need only the engine, and
    forwards all others.
    Raises ConfigError if the name of a parser is unknown, or lora.keep has no store.
    """
    if config.lora.keep and store is None and not (group is not None and group.is_worker):
        raise ConfigError("lora.keep needs a store", fix="set store.path, or leave lora.keep out")
    choose_parsers(None, tool=config.model.tool_parser, reasoning=config.model.reasoning_parser)
    key = group.encryption_key if group is not None else b""
    encryption = Encryption(key or encryption_key(store.directory if store is not None else None))
    state = ServerState(
        engine, config, metrics or Metrics(), make_tracing(config.logging), store, encryption=encryption, group=group
    )
    if group is None or not group.is_worker:
        _watch(state)
    app = FastAPI(
        title="jaxserve",
        version=__version__,
        middleware=_middleware(state),
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load scripts from other hosts
        redoc_url=None,
        lifespan=_lifespan(state, store),
    )
    app.state.server = state
    install_error_handlers(app)
    install_openapi(app, (*BODIES, *ANSWERS))
    install_docs(app)
    for module in ROUTERS if store is None else ROUTERS + STORE_ROUTERS:
        app.include_router(module.router)
    if store is None:
        app.include_router(no_store_router(no_store))
    else:
        batches_of_app = install_batches(app, state, store, BATCH_ENDPOINTS)
        install_responses(app, state, batches_of_app, responses.answer_started)
    return app


def _watch(state: ServerState) -> None:
    """Export the metrics of the whole server that one process knows."""
    state.metrics.watch_engine(lambda: _read_engine(state.engine))
    state.metrics.watch_keys(lambda: _read_keys(state))


async def stop_background(app: FastAPI) -> None:
    """Stop batches and background responses. The next start of the server continues them."""
    if app.state.server.store is not None:
        await app.state.batches.stop()
        await app.state.responses.background.stop()


def check_chat_template(app: FastAPI) -> bool:
    """Render the chat template; return False if the tokenizer is not loaded yet. Blocks. Raises ConfigError."""
    state: ServerState = app.state.server
    try:
        check_template(state)
    except NotReadyError:
        return False
    return True


async def warm_up(app: FastAPI) -> None:
    """Check the tokenizer against the model's vocabulary, and start the process that compiles grammars.

    Call this once the engine is ready and before requests arrive, so that no request waits for either. Raises
    ConfigError if a text can give token ids that the model lacks.
    """
    state: ServerState = app.state.server
    await asyncio.to_thread(check_vocabulary, state)  # renders the chat template
    await asyncio.to_thread(check_pictures, state)
    if state.engine.info.task == "generate":
        await state.grammars.start(state.engine)


def _lifespan(state: ServerState, store: Store | None) -> Lifespan[FastAPI]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Run batches and background responses while the application runs, and stop every helper at its end."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(state.grammars.stop)
            stack.callback(state.text_work.stop)
            stack.callback(state.body_work.stop)
            stack.callback(state.stop_rendering)
            stack.callback(state.stop_pictures)
            if store is not None:
                try:
                    await stack.enter_async_context(batches_running(app))
                    await stack.enter_async_context(responses_running(app))
                except Exception as error:
                    state.startup_error = error
                    raise
            yield

    return lifespan


def _middleware(state: ServerState) -> list[Middleware]:
    """List the middleware, outermost first."""
    section = state.config.server
    log_requests = state.config.logging.requests
    chain = [Middleware(RequestContext, metrics=state.metrics, tracing=state.tracing, log_requests=log_requests)]
    if section.cors_origins:  # around all that writes an answer: a page cannot read an error without its headers
        headers = {"allow_origins": section.cors_origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        chain.insert(0, Middleware(CORSMiddleware, **headers))
    if state.group is not None and state.group.is_worker:
        chain.insert(0, Middleware(ForwardToMain, main_socket=state.group.main_socket))
    return [
        *chain,
        Middleware(Authentication, keys=lambda: state.key_ring, metrics_auth=section.metrics_auth),
        Middleware(
            ReadinessGate,
            engine=state.engine,
            metrics=state.metrics,
            prepare=state.load_template,
            usage_of=lambda owner: state.key_usages.of(owner),
        ),
        Middleware(BodyLimit, limits=state.body_limits, held=state.bodies, timeout=section.body_timeout),
    ]


def _read_engine(engine: EngineProtocol) -> EngineReading:
    try:
        return EngineReading(engine.info, engine.stats(), engine.restarts, engine.replicas)
    except NotReadyError:
        return EngineReading(None, EngineStats(), 0)


def _read_keys(state: ServerState) -> list[dict[str, Any]]:
    try:
        return [usage.as_dict() for usage in state.key_usages.all()]
    except NotReadyError:
        return []
