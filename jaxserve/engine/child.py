"""The main function of an engine process, whatever engine it builds: MODULE DIR, started by ProcessLink.

Reads its configuration as one line of JSON from stdin, joins the sockets in DIR and serves. Stdin stays open as
long as the parent lives: its end ends this process, so no engine outlives its server. No jax here.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import zmq

from jaxserve.config import Config
from jaxserve.engine.server import BuiltEngine, EngineServer
from jaxserve.errors import ConfigError
from jaxserve.log import configure_logging
from jaxserve.runtime.host_memory import keep_freed_memory
from jaxserve.transport.shared_state import SharedState
from jaxserve.transport.socket_directory import STATE
from jaxserve.types.messages import (
    MAX_WEIGHT,
    Failed,
    FromEngine,
    MessageError,
    ToEngine,
    decode_to_engine,
    encode,
    weight,
)

BEAT_INTERVAL = 0.5  # seconds
MAX_FRAMES = 1024  # taken in before the next step, those that are no messages included
MAX_FRAME = 512 * 2**20  # bytes; a longer frame is refused by the socket

logger = logging.getLogger(__name__)

Send = Callable[[FromEngine], None]


class SocketChannel:
    """A Channel over two one-way sockets in a private directory."""

    def __init__(self, directory: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._incoming = _connect(context, zmq.PULL, f"ipc://{directory}/to-engine")
        self._outgoing = _connect(context, zmq.PUSH, f"ipc://{directory}/from-engine")
        self._dropped = 0

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        wait, room = int(timeout * 1000), MAX_WEIGHT
        for _ in range(MAX_FRAMES):
            if room <= 0 or not self._incoming.poll(wait):
                break
            wait = 0
            try:
                messages.append(decode_to_engine(self._incoming.recv()))
                room -= weight(messages[-1])
            except MessageError as error:
                self._dropped += 1
                if self._dropped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...: a flood of them is a few lines
                    logger.error("%d frames dropped so far: %s", self._dropped, error)
        return messages

    def send(self, message: FromEngine) -> None:
        self._outgoing.send(encode(message))


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.connect(address)
    return socket


class Heartbeat(threading.Thread):
    """Shows the API process that this process runs."""

    def __init__(self, state: SharedState) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._state = state

    def run(self) -> None:
        for beats in itertools.count(1):
            self._state.beat(beats)
            time.sleep(BEAT_INTERVAL)


def _end_with_parent() -> None:
    """Block until stdin ends, which it does when the parent is gone; then leave at once."""
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


def serve(build: Callable[[Config, Send], BuiltEngine]) -> int:
    """Run the engine that `build` makes; the exit code."""
    directory = sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    config = Config.model_validate_json(sys.stdin.buffer.readline())
    configure_logging(config.logging)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    channel = SocketChannel(directory, context)
    state = SharedState(Path(directory) / STATE)
    try:
        built = build(config, channel.send)
        server = EngineServer(built, channel, state, log_interval=config.logging.stats_interval)
        Heartbeat(state).start()
        gc.collect()
        gc.freeze()  # what lives now lives on: a full collection over jax's objects would stop a step for 0.15 s
        if all(device.startswith("cpu:") for device in built.info.devices):
            keep_freed_memory()
        server.run()
    except ConfigError as error:
        channel.send(Failed(str(error), error.fix))
        return 2
    except Exception as error:
        logger.exception("the engine failed")
        channel.send(Failed(f"{type(error).__name__}: {error}", expected=False))
        return 1
    return 0


def main(build: Callable[[Config, Send], BuiltEngine]) -> NoReturn:
    """Serve the engine that `build` makes until it is told to stop, and end the process."""
    code = serve(build)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.2)  # lets the socket's thread deliver the last frame; LINGER needs a context that is closed
    os._exit(code)
