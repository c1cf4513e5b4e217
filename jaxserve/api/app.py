"""The HTTP application: routes, middleware and error handlers around one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Lifespan

from jaxserve.api.batch.service import batches_running, install_batches
from jaxserve.api.docs.docs_page import install_docs
from jaxserve.api.docs.openapi import install_openapi
from jaxserve.api.errors.responses import install_error_handlers
from jaxserve.api.http.middleware import Authentication, BodyLimit, ReadinessGate, RequestContext
from jaxserve.api.routes import (
    admin,
    batches,
    chat,
    completions,
    embeddings,
    files,
    health,
    info,
    messages,
    models,
    native,
    sessions,
    tokens,
)
from jaxserve.api.routes.no_store import no_store_router
from jaxserve.api.shared.engine_protocol import EngineProtocol
from jaxserve.api.shared.start_checks import check_template, check_vocabulary
from jaxserve.api.shared.state import ServerState
from jaxserve.config import Config
from jaxserve.errors import NotReadyError
from jaxserve.store import Store
from jaxserve.telemetry.metrics import EngineReading, Metrics
from jaxserve.telemetry.tracing import make_tracing
from jaxserve.text.output.output_parser import choose_parsers
from jaxserve.types.messages import EngineStats
from jaxserve.version import __version__

STORE_ROUTERS = (files, batches)
ROUTERS = (health, models, completions, chat, messages, embeddings, native, sessions, tokens, info, admin)

BATCH_ENDPOINTS = {
    "/v1/chat/completions": chat.create_chat_completion,
    "/v1/completions": completions.create_completion,
    "/v1/embeddings": embeddings.create_embedding,
}


def create_app(
    engine: EngineProtocol,
    config: Config,
    metrics: Metrics | None = None,
    store: Store | None = None,
    no_store: str = "This server was started without a store.",
) -> FastAPI:
    """Build the application around one engine, which may still be loading. The caller starts and stops engine and
    store.

    Without a store, the routes of files and batches answer 503 with the message `no_store`.
    Raises ConfigError if the name of a parser is unknown.
    """
    choose_parsers(None, tool=config.model.tool_parser, reasoning=config.model.reasoning_parser)
    state = ServerState(engine, config, metrics or Metrics(), make_tracing(config.logging), store)
    state.metrics.watch_engine(lambda: _read_engine(engine))
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
    install_openapi(app)
    install_docs(app)
    for module in ROUTERS if store is None else ROUTERS + STORE_ROUTERS:
        app.include_router(module.router)
    if store is None:
        app.include_router(no_store_router(no_store))
    else:
        install_batches(app, state, store, BATCH_ENDPOINTS)
    return app


def check_files(app: FastAPI) -> bool:
    """Load and render the chat template; return whether the tokenizer was already loaded. Blocks. Raises
    ConfigError.
    """
    state: ServerState = app.state.server
    try:
        check_template(state)
    except NotReadyError:
        return False
    return True


async def warm_up(app: FastAPI) -> None:
    """Start the helpers that the first requests would wait for. Call it once the engine is ready.

    Raises ConfigError if the tokenizer does not belong to the model.
    """
    state: ServerState = app.state.server
    await asyncio.to_thread(check_vocabulary, state)  # renders the chat template
    await state.grammars.start(state.engine)


def _lifespan(state: ServerState, store: Store | None) -> Lifespan[FastAPI]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Run the batches while the application runs, and stop every helper at its end."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(state.grammars.stop)
            stack.callback(state.text_work.stop)
            stack.callback(state.body_work.stop)
            stack.callback(state.stop_rendering)
            if store is not None:
                try:
                    await stack.enter_async_context(batches_running(app))
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
    if section.cors_origins:
        headers = {"allow_origins": section.cors_origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        chain.append(Middleware(CORSMiddleware, **headers))
    return [
        *chain,
        Middleware(Authentication, config=section),
        Middleware(ReadinessGate, engine=state.engine, metrics=state.metrics, prepare=state.load_template),
        Middleware(BodyLimit, limits=state.body_limits, held=state.bodies, timeout=section.body_timeout),
    ]


def _read_engine(engine: EngineProtocol) -> EngineReading:
    try:
        return EngineReading(engine.info, engine.stats(), engine.restarts)
    except NotReadyError:
        return EngineReading(None, EngineStats(), 0)
