"""How an engine process joins the others of its group, and how it ends if one of them is lost."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

from jaxserve.config import Config
from jaxserve.engine.hosts import agreement
from jaxserve.engine.hosts.jax_group import join_devices
from jaxserve.engine.hosts.leading import Leader
from jaxserve.transport.group import LeaderEnd
from jaxserve.types.group import Welcome
from jaxserve.types.messages import Failed, FromEngine, Progress

LOST = 3  # exit code
_SEND_TIME = 0.3  # seconds for the last message to leave

logger = logging.getLogger(__name__)

Send = Callable[[FromEngine], None]


def lead(config: Config, send: Send) -> Leader:
    """Wait for the followers and join all devices. Raises ConfigError. send: may be called by another thread.

    When a follower is lost from then on, this process ends, and is started again by its supervisor.
    """
    mesh = config.mesh
    agreement.check_hosts(config)

    def on_loss(reason: str, fix: str | None) -> None:
        end_process(send, reason, fix)

    end = LeaderEnd(
        mesh.leader,
        agreement.group_key(mesh),
        mesh.hosts,
        lambda hello: agreement.objection(config, hello),
        on_loss,
    )
    end.gather(mesh.join_timeout, lambda joined: send(Progress("hosts", joined, mesh.hosts, "hosts")))
    coordinator = f"{mesh.leader[0]}:{agreement.free_port(mesh.leader[0])}"
    end.send(Welcome(agreement.for_followers(config), coordinator))
    join_devices(coordinator, 0, mesh.hosts)
    return Leader(end)


def end_process(send: Send, reason: str, fix: str | None = None) -> None:
    """End this process at once. Its threads may wait for devices of a host that is gone.

    fix: what the operator can do, if it is a mistake of the operator
    """
    logger.error("%s: this engine process ends", reason)
    send(Failed(reason, fix, expected=fix is not None))
    time.sleep(_SEND_TIME)
    sys.stderr.flush()
    os._exit(LOST)
