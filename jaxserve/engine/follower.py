"""The engine of a host that is not the leader: joins the group, loads its part of the model, and follows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from jaxserve.config import Config
from jaxserve.engine.factory import Send, load, locate, make_runner
from jaxserve.engine.hosts import agreement
from jaxserve.engine.hosts.following import Follower, agreed_plan, welcome
from jaxserve.engine.hosts.jax_group import join_devices, write_programs
from jaxserve.engine.hosts.joining import end_process
from jaxserve.errors import ConfigError
from jaxserve.models.pooling import is_embedder, read_pooling
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.transport.group import FollowerEnd, GroupConnectionError, connect
from jaxserve.types.group import HostFailed
from jaxserve.types.messages import Progress

WAITING, SERVING = "waiting for the leader", "serving"  # phases


def follow(config: Config, send: Send) -> None:
    """Follow the leader until it stops. Waits for it as long as it takes; if it is lost then, this process ends.

    send: gets the progress; may be called by another thread. Raises ConfigError.
    """
    mesh = config.mesh
    agreement.check_hosts(config)
    key = agreement.group_key(mesh)
    send(Progress(WAITING))
    connection = connect(mesh.leader, key, lambda _: None)
    end = FollowerEnd(
        connection, agreement.hello(config), lambda reason: end_process(send, f"the leader is lost: {reason}")
    )
    with _told(end):
        first = welcome(end)
        follower = _built(agreement.followed(config, first.config), end, send, first.coordinator)
        follower.warm_up()
        send(Progress(SERVING))
        follower.run()
    end.close()


@contextlib.contextmanager
def _told(end: FollowerEnd) -> Iterator[None]:
    """Tell the leader why this host fails, if it does."""
    try:
        yield
    except Exception as error:
        fix = error.fix if isinstance(error, ConfigError) else None
        with contextlib.suppress(GroupConnectionError):
            end.send(HostFailed(f"{type(error).__name__}: {error}", fix))
        raise


def _built(config: Config, end: FollowerEnd, send: Send, coordinator: str) -> Follower:
    """Load this host's part of the model and compile. config: the leader's, with what is this host's own."""
    section = config.mesh
    directory = locate(config)
    send(Progress("devices"))
    join_devices(coordinator, section.host_rank, section.hosts)
    mesh = make_mesh(section.device, data=section.data, tensor=section.tensor, expert=section.expert)
    write_programs()
    send(Progress("weights", unit="bytes"))
    loaded = load(config, directory, mesh, send)
    if is_embedder(directory, loaded.config) or loaded.config.labels:
        config = config.replace(speculation={"method": "off"})
    send(Progress("programs", unit="programs"))
    agree = functools.partial(agreed_plan, end)
    runner = make_runner(config, loaded, read_pooling(directory, loaded.config), mesh, send, agree)
    assert isinstance(runner, ModelRunner)
    return Follower(end, runner, directory)
