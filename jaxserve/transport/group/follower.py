"""A follower's end of a group: connects to the leader, as often as it takes, and receives its messages in order.

A thread receives, so that the loss of the leader is noticed while a step is computed.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from jaxserve.transport.group.connection import Connection, GroupConnectionError
from jaxserve.transport.group.leader import BEAT_INTERVAL, HANDSHAKE_LIMIT, SILENCE_LIMIT
from jaxserve.types.group import Beat, Hello, LeaderEnds, Message, Rejected, ToFollower, decode_to_follower, encode

RETRY_DELAY = 0.5  # seconds between two tries to connect


def connect(address: tuple[str, int], key: bytes, on_failure: Callable[[str], None]) -> Connection:
    """Connect to the leader, which may not run yet. Tries until it succeeds. on_failure: called after each failure."""
    while True:
        try:
            stream = socket.create_connection(address, timeout=HANDSHAKE_LIMIT)
            return Connection.open(stream, key, leads=False, timeout=HANDSHAKE_LIMIT)
        except (OSError, GroupConnectionError) as error:
            on_failure(str(error))
        time.sleep(RETRY_DELAY)


class FollowerEnd:
    """The connection of a follower to its leader.

    hello: the first message. on_loss: called in a thread, once, if the leader is gone; it should end the process.

    A leader that sent Rejected or LeaderEnds closes the connection, which is no loss: the
    process ends as the message says.
    """

    def __init__(self, connection: Connection, hello: Hello, on_loss: Callable[[str], None]) -> None:
        self._connection = connection
        self._on_loss = on_loss
        self._messages: queue.SimpleQueue[ToFollower] = queue.SimpleQueue()
        self._closing = False
        connection.limit(SILENCE_LIMIT)
        connection.send(encode(hello))
        threading.Thread(target=self._read, name="leader", daemon=True).start()
        threading.Thread(target=self._beat, name="group-beat", daemon=True).start()

    def receive(self) -> ToFollower:
        """Return the next message of the leader but Beats. Waits for it."""
        return self._messages.get()

    def send(self, message: Message) -> None:
        """Send a message to the leader. Raises GroupConnectionError."""
        self._connection.send(encode(message))

    def _read(self) -> None:
        try:
            while True:
                message = decode_to_follower(self._connection.receive())
                if not isinstance(message, Beat):
                    self._messages.put(message)
                if isinstance(message, Rejected | LeaderEnds):
                    return
        except (GroupConnectionError, msgspec.MsgspecError) as error:
            if not self._closing:
                self._on_loss(str(error))

    def _beat(self) -> None:
        with contextlib.suppress(GroupConnectionError):  # the thread that reads notices it too
            while not self._closing:
                self.send(Beat())
                time.sleep(BEAT_INTERVAL)

    def close(self) -> None:
        """Close the connection. `on_loss` is not called any more."""
        self._closing = True
        self._connection.close()
