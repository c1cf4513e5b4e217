"""The two deployments of an application: an ingress that reads requests, and engines that answer them.

    Serve's proxy -> Ingress: reads the body -> PrefixRouter -> Engine: the FastAPI application, an engine process

A replica of the engine's deployment is one engine with its supervisor. If the engine's process dies, the replica stays
and its requests are replayed, as under `jaxserve launch`. An engine over several hosts has more actors (group.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
    BackPressureError,
    DeploymentUnavailableError,
)
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.types import Message

from jaxserve.api.app import check_chat_template, create_app, warm_up
from jaxserve.cli.options import load_config
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.errors import EngineDeadError, NotReadyError, QueueFullError
from jaxserve.log import configure_logging
from jaxserve.ray.group import Group
from jaxserve.ray.metric_export import MetricExport
from jaxserve.ray.relay import (
    Parts,
    RelayedAnswer,
    RelayedRequest,
    ReplicaLostError,
    ingress_app,
    run_app,
    with_allowed_hosts,
)
from jaxserve.ray.settings import RaySettings

NO_STORE = "Under Ray Serve there is no store: what one replica stored would be unknown to the others."


def application(args: Mapping[str, Any]) -> Any:
    """Build the application. Raises ConfigError."""
    settings = RaySettings.parse(args, os.environ)
    replica = serve.deployment(**settings.engine)(EngineReplica)
    engines = replica.bind(settings.words, settings.log_engine_metrics, settings.followers)
    ingress = serve.deployment(**settings.ingress)(Ingress)
    return ingress.bind(engines, settings.words, settings.variables)


class EngineReplica:
    """One engine and its application. words: flags of `jaxserve launch`; this process's environment is read too

    followers: options of the actor of each further host of the engine
    """

    async def __init__(
        self, words: tuple[str, ...], log_engine_metrics: bool, followers: Sequence[dict[str, Any]]
    ) -> None:
        """Return when requests are answered without delay. Raises ConfigError if the engine cannot start."""
        config = load_config(words, os.environ)
        configure_logging(config.logging)
        self._drain_timeout = config.server.drain_timeout
        stack = self._stack = AsyncExitStack()  # Ray may end this replica, and so take the attribute, at any await
        self._group = await asyncio.to_thread(Group, words, config, followers) if followers else None
        if self._group is not None:
            stack.callback(self._group.close)
            config = self._group.config
        self._engine = AsyncEngine(config)
        stack.push_async_callback(self._engine.stop)
        try:
            self._app = create_app(self._engine, config, no_store=NO_STORE)
            self._served = with_allowed_hosts(self._app, config.server)
            await (self._engine.start() if self._group is None else self._group.start(self._engine.start()))
            await asyncio.to_thread(check_chat_template, self._app)
            await stack.enter_async_context(self._app.router.lifespan_context(self._app))
            await warm_up(self._app)
        except BaseException:
            await stack.aclose()
            raise
        if log_engine_metrics:
            export = MetricExport(self._app.state.server.metrics.registry)
            stack.callback(asyncio.create_task(export.run()).cancel)

    async def answer(self, request: RelayedRequest) -> Parts:
        """Yield the application's answer, as lists of ASGI messages."""
        parts = run_app(self._served, request)
        try:
            async for messages in parts:
                yield messages
        finally:
            await parts.aclose()

    async def check_health(self) -> None:
        """Called by Ray's controller. Raises EngineDeadError where no engine will answer any more.

        While the engine is started again, or is silent and the watchdog may end it, the replica is healthy: its
        requests go on in the next engine, and a new replica would lose them. The router gives it no further ones.
        """
        if self._engine.status.phase == "dead":
            raise EngineDeadError(f"the engine is dead: {self._engine.status.detail}")
        if self._group is not None and self._group.failure is not None:
            raise EngineDeadError(self._group.failure)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray's controller every second; PrefixRouter reads it."""
        return {"is_ready": self._engine.alive, "num_requests": self._engine.num_live}

    def __del__(self) -> Awaitable[None] | None:
        """Called and awaited by Ray after the requests of a replica have ended or its grace period has."""
        stack = self.__dict__.pop("_stack", None)
        return None if stack is None else self._close(stack)

    async def _close(self, stack: AsyncExitStack) -> None:
        self._engine.drain()
        await stack.aclose()


class Ingress:
    """Reads each request and passes it on to the engine that the router chooses.

    words: flags of `jaxserve launch`. variables: of the engines' environment, beside those of this process
    """

    def __init__(self, engines: Any, words: tuple[str, ...], variables: Mapping[str, str]) -> None:
        self._answer = engines.options(stream=True).answer
        self._app = ingress_app(self._ask, load_config(words, {**os.environ, **variables}).server)

    async def __call__(self, request: Request) -> RelayedAnswer:
        return RelayedAnswer(get_route_path(request.scope), self._app)

    async def _ask(self, request: RelayedRequest) -> AsyncIterator[list[Message]]:
        """Yield what one replica answers. Raises ReplicaLostError, QueueFullError and NotReadyError."""
        parts = self._answer.remote(request)
        try:
            async for messages in parts:
                yield messages
        except RayActorError as error:
            raise ReplicaLostError(str(error)) from None
        except BackPressureError:
            raise QueueFullError("The queue of the engines is full.", limit="max_queued_requests") from None
        except DeploymentUnavailableError:
            raise NotReadyError("No engine runs. The controller's log says why.") from None
        finally:
            parts.cancel()
