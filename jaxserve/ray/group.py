"""An engine over several hosts of a Ray cluster: each bundle of its replica's placement group is a host.

    bundle 0       the replica: the leader, with its engine process
    bundle 1, ...  a FollowerActor each, which keeps the engine process of that host

Ray starts an actor that ended again, in its bundle, and it joins the group. Actors end with the replica that started
them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from ray import kill, remote  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util import (  # pyright: ignore[reportMissingImports]
    get_current_placement_group,
    get_node_ip_address,
    placement_group_table,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from jaxserve.cli.options import load_config
from jaxserve.client.link import FollowerKeeper
from jaxserve.config import Config
from jaxserve.engine.hosts.agreement import free_port
from jaxserve.errors import ConfigError
from jaxserve.log import configure_logging
from jaxserve.transport.socket_directory import SocketDirectory

LOOPBACK = "127.0.0.1"
FOR_EVER = {"max_restarts": -1, "max_task_retries": -1}


class FollowerActor:
    """One host that is not the leader. words: flags of `jaxserve launch`; this process's environment is read too"""

    def __init__(self, words: Sequence[str], rank: int, leader: str, key: str) -> None:
        """leader: HOST:PORT. key: of the group"""
        config = load_config(words, os.environ)
        configure_logging(config.logging)
        self._directory = SocketDirectory()
        self._keeper = FollowerKeeper(group_config(config, self._directory.path, leader, key, rank))

    async def follow(self) -> str:
        """Follow as long as this actor lives. Returns why this host cannot, if it cannot."""
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
    """The followers of the engine in this replica. config: of its leader. options: of each follower's actor"""

    def __init__(self, words: Sequence[str], config: Config, options: Sequence[dict[str, Any]]) -> None:
        """Start the actors. Waits for Ray. Raises ConfigError."""
        placement = get_current_placement_group()
        nodes = placement_group_table(placement)["bundles_to_node_id"]
        host = LOOPBACK if len(set(nodes.values())) == 1 else get_node_ip_address()
        leader, key = f"{host}:{free_port(host)}", secrets.token_hex(32)
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
        """Why a host cannot follow any more; None if all can."""
        return next((each.result() for each in self._failures if each.done() and not each.cancelled()), None)

    def close(self) -> None:
        """End all actors, and so their engine processes."""
        for task in self._failures:
            task.cancel()
        for actor in self._actors:
            kill(actor)
        self._directory.remove()


async def _reason(rank: int, end: Awaitable[str]) -> str:
    """Wait for the end of a follower. Returns why."""
    try:
        return f"host {rank} cannot follow: {await end}"
    except RayError as error:
        return f"host {rank} is lost: {error}"
