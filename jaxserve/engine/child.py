"""The main function of an engine process (`python -m MODULE DIR`, started by ProcessLink), for any engine.

Reads its configuration as one line of JSON from stdin, connects to the sockets in DIR and serves. Stdin stays open
as long as the parent lives. When it closes, this process exits, so that no engine outlives its server. No jax here.
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
from typing import TYPE_CHECKING, NoReturn

import zmq

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.log import configure_logging
from jaxserve.system import keep_freed_memory
from jaxserve.transport.child import end_with_parent
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

if TYPE_CHECKING:  # it imports jax, which `build` does
    from jaxserve.engine.server import BuiltEngine

HEARTBEAT_INTERVAL = 0.5  # seconds
LAST_MESSAGE_SECONDS = 0.2  # the last message of a normal end
# The reason of a failed start: the parent may still be importing its modules before it reads.
FAILURE_SECONDS = 30.0
MAX_FRAMES = 1024  # read before the next step; invalid frames count too
MAX_MESSAGE_BYTES = 512 * 2**20  # bytes; the socket refuses longer frames

logger = logging.getLogger(__name__)

Send = Callable[[FromEngine], None]


class SocketChannel:
    """A Channel over two one-way sockets in a private directory."""

    def __init__(self, directory: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context, self._is_closed = context, False
        self._incoming = _connect(context, zmq.PULL, f"ipc://{directory}/to-engine")
        self._outgoing = _connect(context, zmq.PUSH, f"ipc://{directory}/from-engine")
        self._dropped = 0
        self._sending = threading.Lock()

    def receive(self, timeout: float) -> list[ToEngine]:
        """Receive the messages that are there, up to MAX_WEIGHT. Waits at most `timeout` seconds for the first one.

        An invalid frame is logged and dropped.
        """
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
                # log the 1st, 2nd, 4th, 8th ...: a flood of invalid frames gives few lines
                if self._dropped.bit_count() == 1:
                    logger.error("%d frames dropped so far: %s", self._dropped, error)
        return messages

    def send(self, message: FromEngine) -> None:
        """Send a message. Any thread may call this."""
        with self._sending:
            if not self._is_closed:
                self._outgoing.send(encode(message))

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` until the parent has the last messages. Later messages are dropped."""
        with self._sending:
            self._is_closed = True
            self._context.destroy(linger=int(seconds * 1000))


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.connect(address)
    return socket


class Heartbeat(threading.Thread):
    """A thread that shows the API process that this process is alive."""

    def __init__(self, state: SharedState) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._state = state

    def run(self) -> None:
        for beats in itertools.count(1):
            self._state.beat(beats)
            time.sleep(HEARTBEAT_INTERVAL)


FULL_COLLECTION = 1000  # collections of the middle generation before a full one; Python's own number is 10


def serve(build: Callable[[Config, Send], BuiltEngine]) -> int:
    """Run the engine that `build` returns. Returns the exit code."""
    directory = sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    config = Config.model_validate_json(sys.stdin.buffer.readline())
    configure_logging(config.logging)
    end_with_parent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    channel = SocketChannel(directory, context)
    state = SharedState(Path(directory) / STATE)
    try:
        built = build(config, channel.send)
        server = built.server(channel, state, log_interval=config.logging.stats_interval)
        Heartbeat(state).start()
        gc.collect()
        # exclude start-up objects from garbage collection: scanning jax's objects would pause a step for 0.15 s
        gc.freeze()
        # A full collection walks the whole prefix cache, 2 us a page, and finds nothing: nodes are freed when they are
        # evicted. By Python's rule there would be one for every fourth part of the cache that is replaced.
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)
        if all(device.startswith("cpu:") for device in built.info.devices):
            keep_freed_memory()
        server.run()
        channel.close(LAST_MESSAGE_SECONDS)
    except ConfigError as error:
        channel.send(Failed(str(error), error.fix))
        channel.close(FAILURE_SECONDS)
        return 2
    except Exception as error:
        logger.exception("the engine failed")
        channel.send(Failed(f"{type(error).__name__}: {error}", expected=False))
        channel.close(FAILURE_SECONDS)
        return 1
    return 0


def main(build: Callable[[Config, Send], BuiltEngine]) -> NoReturn:
    """Run the engine that `build` returns until a Stop message comes, then exit the process."""
    code = serve(build)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
