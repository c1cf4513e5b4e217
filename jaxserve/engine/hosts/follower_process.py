"""The engine process of a host that is not the leader: `python -m jaxserve.engine.hosts.follower_process DIR`.

It schedules nothing and serves nothing. Its parent sees the progress of its start, then the phase SERVING.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import zmq

from jaxserve.config import Config
from jaxserve.engine.child import Heartbeat, SocketChannel
from jaxserve.engine.hosts.follower import follow
from jaxserve.errors import ConfigError
from jaxserve.log import configure_logging
from jaxserve.transport.child import end_with_parent
from jaxserve.transport.shared_state import SharedState
from jaxserve.transport.socket_directory import STATE
from jaxserve.types.messages import Failed

logger = logging.getLogger(__name__)


def serve() -> int:
    """Follow the leader until it stops. Returns the exit code."""
    directory = sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    config = Config.model_validate_json(sys.stdin.buffer.readline())
    configure_logging(config.logging)
    end_with_parent()
    channel = SocketChannel(directory, zmq.Context(io_threads=1))
    Heartbeat(SharedState(Path(directory) / STATE)).start()
    try:
        follow(config, channel.send)
    except ConfigError as error:
        channel.send(Failed(str(error), error.fix))
        return 2
    except Exception as error:
        logger.exception("the follower failed")
        channel.send(Failed(f"{type(error).__name__}: {error}", expected=False))
        return 1
    return 0


if __name__ == "__main__":
    code = serve()
    sys.stderr.flush()
    time.sleep(0.2)  # time for the socket's thread to send the last frame
    os._exit(code)
