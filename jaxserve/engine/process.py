"""The engine process: `python -m jaxserve.engine.process DIR`, started by ProcessLink and by nobody else.

Reads its configuration as one line of JSON from stdin, joins the sockets in DIR and serves. Stdin stays open as
long as the parent lives: its end ends this process, so no engine outlives its server.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import zmq

from jaxserve.config import Config
from jaxserve.engine.factory import Send, build_engine
from jaxserve.engine.messages import (
    Beat,
    Failed,
    FromEngine,
    MessageError,
    ToEngine,
    decode_to_engine,
    encode,
)
from jaxserve.engine.server import BuiltEngine, EngineServer
from jaxserve.errors import ConfigError
from jaxserve.log import configure_logging
from jaxserve.runtime.host_memory import keep_freed_memory

BEAT_INTERVAL = 0.5  # seconds
MAX_FRAMES = 1024  # taken in before the next step, so that no flood of them stops the engine
MAX_FRAME = 512 * 2**20  # bytes; a longer frame is refused by the socket

logger = logging.getLogger(__name__)


class SocketChannel:
    """A Channel over two one-way sockets in a private directory."""

    def __init__(self, directory: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._incoming = _connect(context, zmq.PULL, f"ipc://{directory}/to-engine")
        self._outgoing = _connect(context, zmq.PUSH, f"ipc://{directory}/from-engine")
        self._dropped = 0

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        wait = int(timeout * 1000)
        for _ in range(MAX_FRAMES):
            if not self._incoming.poll(wait):
                break
            wait = 0
            try:
                messages.append(decode_to_engine(self._incoming.recv()))
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
    """Tells the API process that this process runs, and for how long the engine has been in its current turn."""

    def __init__(self, directory: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.server: EngineServer | None = None
        self._socket = _connect(context, zmq.PUSH, f"ipc://{directory}/from-engine")

    def run(self) -> None:
        while True:
            self._socket.send(encode(self._beat()))
            time.sleep(BEAT_INTERVAL)

    def _beat(self) -> Beat:
        if self.server is None:
            return Beat(step=0, busy_seconds=0.0)
        return Beat(step=self.server.steps, busy_seconds=time.monotonic() - self.server.turn_started)


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
    heartbeat = Heartbeat(directory, context)
    heartbeat.start()
    try:
        built = build(config, channel.send)
        server = EngineServer(built, channel, log_interval=config.logging.stats_interval)
        heartbeat.server = server
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


def main(build: Callable[[Config, Send], BuiltEngine] = build_engine) -> NoReturn:
    code = serve(build)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.2)  # lets the socket's thread deliver the last frame; LINGER needs a context that is closed
    os._exit(code)


if __name__ == "__main__":
    main()
