"""Connect stored responses, their background runner and the routes of one application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from fastapi import FastAPI

from jaxserve.api.batch.batch_request import engine_ready
from jaxserve.api.batch.runner import BatchRunner
from jaxserve.api.response_state.background import BackgroundRunner, BackgroundSettings, EventSource, StartedResponse
from jaxserve.api.response_state.locks import ConversationLocks
from jaxserve.api.responses.answer import Keeper
from jaxserve.api.shared.state import ServerState
from jaxserve.store.responses import ResponseStore


@dataclass(frozen=True)
class StoredResponses:
    """The stored responses and conversations of one server."""

    store: ResponseStore
    locks: ConversationLocks
    background: BackgroundRunner


MakeAnswer = Callable[[StartedResponse, Keeper, ServerState, StoredResponses], Awaitable[EventSource]]


def install_responses(app: FastAPI, state: ServerState, batches: BatchRunner, make_answer: MakeAnswer) -> None:
    """Create the stored responses of `app`, whose background runs within `responses_running`.

    Background responses share the window of `batches`. make_answer: plans one of them
    """
    store, locks = batches.store.responses, ConversationLocks()
    settings = BackgroundSettings(
        make_answer=lambda started, keeper: make_answer(started, keeper, state, stored),
        ready=lambda: engine_ready(state.engine.check_ready),
    )
    background = BackgroundRunner(store, batches.window, locks, settings)
    stored = app.state.responses = StoredResponses(store, locks, background)
    state.metrics.watch_gauges(lambda: {"jaxserve:background_responses_running": float(background.num_running)})


@contextlib.asynccontextmanager
async def responses_running(app: FastAPI) -> AsyncIterator[None]:
    """Run the application's background responses for as long as the context is open."""
    background = app.state.responses.background
    await background.start()
    try:
        yield
    finally:
        await background.stop()


def stored_responses(app: FastAPI) -> StoredResponses | None:
    """Return the stored responses of an application; None on a server without a store."""
    return getattr(app.state, "responses", None)
