"""Build the application under Ray Serve: HTTP ingress, engine replicas, and metrics.

A `Group` starts the followers of an engine on several hosts. `EngineReplica` is one engine with its application, and
exports its metrics to Serve. The `Ingress` reads each request and sends it to the replica that the router ranks first.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ray import kill, remote, serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from ray.exceptions import RayActorError, RayError  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
    BackPressureError,
    DeploymentUnavailableError,
)
from ray.serve.metrics import Gauge  # pyright: ignore[reportMissingImports]
from ray.util import (  # pyright: ignore[reportMissingImports]
    get_current_placement_group,
    get_node_ip_address,
    placement_group_table,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.types import Message

from jaxserve.api.app import check_chat_template, create_app, warm_up
from jaxserve.cli.options import load_config
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import FollowerKeeper
from jaxserve.config import Config
from jaxserve.engine.hosts.agreement import free_port
from jaxserve.errors import ConfigError, EngineDeadError, NotReadyError, QueueFullError
from jaxserve.log import configure_logging
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
from jaxserve.telemetry.metrics import Metrics
from jaxserve.transport.socket_directory import SocketDirectory

LOOPBACK = "127.0.0.1"
FOR_EVER = {"max_restarts": -1, "max_task_retries": -1}


class FollowerActor:
    """One host that is not the leader.

    words: flags of `jaxserve launch`, beside this process's environment
    """

    def __init__(self, words: Sequence[str], rank: int, leader: str, key: str) -> None:
        """Read the configuration. leader: HOST:PORT of the leader. key: key of the group"""
        config = load_config(words, os.environ)
        configure_logging(config.logging)
        self._directory = SocketDirectory()
        self._keeper = FollowerKeeper(group_config(config, self._directory.path, leader, key, rank))

    async def follow(self) -> str:
        """Follow as long as this actor lives. If this host cannot follow, return the reason."""
        try:
            await self._keeper.run()
        except ConfigError as error:
            return f"{error}; {error.fix}" if error.fix else str(error)
        return "it ended"


def group_config(config: Config, directory: Path, leader: str, key: str, rank: int) -> Config:
    """Return the configuration of one host. directory: a private one, for the file with the key"""
    file = directory / "key"
    file.touch(mode=0o600)
    file.write_text(key)
    own = {"host_rank": rank, "leader_address": leader, "leader_port": None, "cluster": "none"}
    return config.replace(mesh=own | {"group_key_file": str(file)})


class Group:
    """The followers of the engine in this replica.

    config: configuration of the leader. options: options of each follower's actor
    """

    def __init__(self, words: Sequence[str], config: Config, options: Sequence[dict[str, Any]]) -> None:
        """Start the actors. Waits for Ray. Raises ConfigError."""
        placement = get_current_placement_group()
        nodes = placement_group_table(placement)["bundles_to_node_id"]
        host = LOOPBACK if len(set(nodes.values())) == 1 else get_node_ip_address()
        leader = f"{host}:{free_port(host)}"
        key = secrets.token_hex(32)
        self._directory = SocketDirectory()
        self.config = group_config(config, self._directory.path, leader, key, 0)
        self._actors: list[Any] = []
        for rank, resources in enumerate(options, 1):
            place = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank)
            actor = remote(FollowerActor).options(**resources, **FOR_EVER, scheduling_strategy=place)
            self._actors.append(actor.remote(words, rank, leader, key))
        self._ends = [actor.follow.remote() for actor in self._actors]
        self._failures: list[asyncio.Task[str]] = []

    async def start(self, engine: Awaitable[None]) -> None:
        """Wait for the start of the engine. Raises ConfigError if a host cannot follow."""
        self._failures = [asyncio.create_task(_reason(rank, end)) for rank, end in enumerate(self._ends, 1)]
        starting = asyncio.ensure_future(engine)
        await asyncio.wait([starting, *self._failures], return_when=asyncio.FIRST_COMPLETED)
        if self.failure is not None:
            starting.cancel()
            raise ConfigError(self.failure)
        await starting

    @property
    def failure(self) -> str | None:
        """Return the reason why a host cannot follow any more; None if all hosts can."""
        return next((each.result() for each in self._failures if each.done() and not each.cancelled()), None)

    def close(self) -> None:
        """End all actors, which ends their engine processes too."""
        for task in self._failures:
            task.cancel()
        for actor in self._actors:
            kill(actor)
        self._directory.remove()


async def _reason(rank: int, end: Awaitable[str]) -> str:
    """Wait for the end of a follower and return its reason."""
    try:
        return f"host {rank} cannot follow: {await end}"
    except RayError as error:
        return f"host {rank} is lost: {error}"


INTERVAL = 5.0  # seconds; Ray's agent collects at this rate


class MetricExport:
    """Write every sample as a gauge of Serve, which adds deployment and replica as tags. Buckets keep their `le`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._gauges: dict[str, Gauge] = {}

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(INTERVAL)

    def write(self) -> None:
        """Write the current values once."""
        for family in self._metrics.families():
            for name, labels, value in family["samples"]:
                if family["name"].startswith("jaxserve:") and not name.endswith("_created"):
                    self._gauge(name, family["text"], labels).set(value, tags=labels)

    def _gauge(self, name: str, text: str, labels: dict[str, str]) -> Gauge:
        if name not in self._gauges:
            plain = re.sub(r"\W", "_", name)
            self._gauges[name] = Gauge(plain, description=text, tag_keys=tuple(labels))
        return self._gauges[name]


NO_STORE = "Under Ray Serve there is no store: what one replica stored would be unknown to the others."


def application(args: Mapping[str, Any]) -> Any:
    """Build the application. Raises ConfigError."""
    settings = RaySettings.parse(args, os.environ)
    replica = serve.deployment(**settings.engine)(EngineReplica)
    engines = replica.bind(settings.words, settings.log_engine_metrics, settings.followers)
    ingress = serve.deployment(**settings.ingress)(Ingress)
    return ingress.bind(engines, settings.words, settings.variables)


class EngineReplica:
    """One engine and its application.

    words: flags of `jaxserve launch`, beside this process's environment
    followers: options of the actor of each further host of the engine
    """

    async def __init__(
        self, words: tuple[str, ...], log_engine_metrics: bool, followers: Sequence[dict[str, Any]]
    ) -> None:
        """Start the engine, and return when requests are answered without delay.

        Raises ConfigError if the engine cannot start.
        """
        config = load_config(words, os.environ)
        configure_logging(config.logging)
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
            export = MetricExport(self._app.state.server.metrics)
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
        """Raise EngineDeadError if no engine will answer any more. Ray's controller calls this.

        While the engine restarts, or is silent and the watchdog may end it, the replica is healthy. Its requests go on
        in the next engine, and a new replica would lose them. The router sends it no further requests.
        """
        if self._engine.status.phase == "dead":
            raise EngineDeadError(f"the engine is dead: {self._engine.status.detail}")
        if self._group is not None and self._group.failure is not None:
            raise EngineDeadError(self._group.failure)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the replica's load, which PrefixRouter reads. Ray's controller calls this every second."""
        return {"is_ready": self._engine.alive, "num_requests": self._engine.num_live}

    def __del__(self) -> Awaitable[None] | None:
        """End the engine. Ray calls and awaits this after the replica's requests or its grace period have ended."""
        stack = self.__dict__.pop("_stack", None)
        return None if stack is None else self._close(stack)

    async def _close(self, stack: AsyncExitStack) -> None:
        self._engine.drain()
        await stack.aclose()


class Ingress:
    """Read each request and pass it on to the engine that the router chooses.

    words: flags of `jaxserve launch`
    variables: environment variables of the engines, beside this process's environment
    """

    def __init__(self, engines: Any, words: tuple[str, ...], variables: Mapping[str, str]) -> None:
        self._answer = engines.options(stream=True).answer
        self._app = ingress_app(self._ask, load_config(words, {**os.environ, **variables}).server)

    async def __call__(self, request: Request) -> RelayedAnswer:
        return RelayedAnswer(get_route_path(request.scope), self._app)

    async def _ask(self, request: RelayedRequest) -> AsyncIterator[list[Message]]:
        """Yield the answer of one replica. Raises ReplicaLostError, QueueFullError or NotReadyError."""
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
