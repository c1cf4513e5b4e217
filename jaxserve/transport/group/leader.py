"""The leader's end of a group: takes the followers in, sends them every message, and notices the loss of one.

A thread per follower receives. If a follower is lost, `on_loss` is called once, in such a thread; it should end the
process, because the devices of the group can do nothing without those of the follower.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from jaxserve.errors import ConfigError, ServerError
from jaxserve.transport.group.connection import Connection, GroupConnectionError
from jaxserve.types.group import (
    Beat,
    Done,
    Hello,
    HostFailed,
    Message,
    PlanOffer,
    Rejected,
    decode_to_leader,
    encode,
)

HANDSHAKE_LIMIT = 10.0  # seconds that a new connection has to prove itself and say who it is
MAX_HANDSHAKES = 32  # at once; further connections are closed
BEAT_INTERVAL = 1.0  # seconds
SILENCE_LIMIT = 30.0  # seconds without a frame after which the other host counts as lost
TICK_INTERVAL = 0.5  # seconds between two calls of `tick` while followers are waited for
ACCEPT_DELAY = 0.5  # seconds until connections are accepted again after an error

logger = logging.getLogger(__name__)

Check = Callable[[Hello], str | None]  # why a follower cannot be in the group; None: it can
OnLoss = Callable[[str, str | None], None]  # (what happened, what to do about it)


class HostLostError(ServerError):
    """A host of the group is gone or does not answer. A call that fails for it has status 500."""


class LeaderEnd:
    """The connections of the leader to its followers.

    address: to listen on, and nowhere else. num_hosts: with the leader. check: of each new follower's Hello.
    """

    def __init__(self, address: tuple[str, int], key: bytes, num_hosts: int, check: Check, on_loss: OnLoss) -> None:
        self._key = key
        self._num_hosts = num_hosts
        self._check = check
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._joined: dict[int, Connection] = {}
        self._changed = threading.Event()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._closing = self._formed = False
        self._lost = threading.Event()
        self._answers: dict[int, queue.SimpleQueue[PlanOffer | Done]] = {}
        try:
            self._listener = socket.create_server(address, backlog=MAX_HANDSHAKES)
        except OSError as error:
            raise ConfigError(
                f"the leader cannot listen on {address[0]}:{address[1]}: {error.strerror or error}",
                fix="set mesh.leader_address to an address of host 0, and mesh.leader_port to a free port",
            ) from error
        for work, name in ((self._accept, "group-accept"), (self._beat, "group-beat")):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def port(self) -> int:
        """The port that the leader listens on."""
        return self._listener.getsockname()[1]

    def gather(self, timeout: float, on_progress: Callable[[int], None] = lambda joined: None) -> None:
        """Wait until every follower is there. Raises ConfigError with the missing ranks after `timeout` seconds.

        on_progress: called with the number of hosts that are there, when it changes
        """
        deadline = time.monotonic() + timeout
        while missing := self._form():
            on_progress(self._num_hosts - len(missing))
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                ranks = ", ".join(map(str, missing))
                raise ConfigError(
                    f"after {timeout:.0f} s these of {self._num_hosts} hosts have not joined: {ranks}",
                    fix="start `jaxserve launch --node-rank N` on each, with the same leader address and key",
                )
            self._changed.clear()
        on_progress(self._num_hosts)
        self._listener.close()
        for rank, connection in sorted(self._joined.items()):
            self._answers[rank] = queue.SimpleQueue()
            connection.limit(SILENCE_LIMIT)
            threading.Thread(target=self._read, args=(rank, connection), name=f"host-{rank}", daemon=True).start()

    def _form(self) -> list[int]:
        """Return the ranks that are missing. If there are none, no host can join or leave any more."""
        with self._lock:
            missing = [rank for rank in range(1, self._num_hosts) if rank not in self._joined]
            self._formed = not missing
        return missing

    # --- joining

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                stream, _ = self._listener.accept()
            except OSError as error:  # it was closed, the connection ended already, or this process has no descriptor
                if self._listener.fileno() >= 0:
                    logger.warning("a host could not join: %s", error)
                    time.sleep(ACCEPT_DELAY)
                continue
            if not self._handshakes.acquire(blocking=False):
                stream.close()
                continue
            threading.Thread(target=self._take, args=(stream,), name="group-handshake", daemon=True).start()

    def _take(self, stream: socket.socket) -> None:
        try:
            connection = Connection.open(stream, self._key, leads=True, timeout=HANDSHAKE_LIMIT)
            connection.limit(HANDSHAKE_LIMIT)
            self._join(connection)
        except GroupConnectionError:
            stream.close()
        finally:
            self._handshakes.release()

    def _join(self, connection: Connection) -> None:
        try:
            hello = decode_to_leader(connection.receive())
        except msgspec.MsgspecError:
            return connection.close()
        if not isinstance(hello, Hello):
            return connection.close()
        reason = self._check(hello)
        if reason is not None:
            connection.send(encode(Rejected(reason)))
            return connection.close()
        with self._lock:
            if self._formed or self._closing:
                return connection.close()  # it tries again
            before = self._joined.get(hello.rank)
            self._joined[hello.rank] = connection
        if before is not None:  # the same host, started again
            before.close()
        self._changed.set()

    # --- a formed group

    def send(self, message: Message) -> None:
        """Send a message to every follower. Raises HostLostError."""
        body = encode(message)
        for rank, connection in self._joined.items():
            try:
                connection.send(body)
            except GroupConnectionError as error:
                self.lose(f"host {rank} is lost: {error}")
                raise HostLostError(f"host {rank} is lost: {error}") from error

    def answers(self, timeout: float, tick: Callable[[], None] = lambda: None) -> Mapping[int, PlanOffer | Done]:
        """Wait for one answer of each follower, by rank. Raises HostLostError. tick: called again and again."""
        found: dict[int, PlanOffer | Done] = {}
        deadline = time.monotonic() + timeout
        for rank, answers in self._answers.items():
            while rank not in found:
                tick()
                try:
                    found[rank] = answers.get(timeout=TICK_INTERVAL)
                except queue.Empty:
                    if time.monotonic() > deadline:
                        self.lose(f"host {rank} does not answer")
                    if self._lost.is_set():
                        raise HostLostError(f"host {rank} does not answer") from None
        return found

    def _read(self, rank: int, connection: Connection) -> None:
        fix: str | None = None
        try:
            while True:
                message = decode_to_leader(connection.receive())
                if isinstance(message, HostFailed):
                    reason, fix = message.reason, message.fix
                    break
                if isinstance(message, PlanOffer | Done):
                    self._answers[rank].put(message)
        except (GroupConnectionError, msgspec.MsgspecError) as error:
            reason = str(error)
        self.lose(f"host {rank} is lost: {reason}", fix)

    def lose(self, reason: str, fix: str | None = None) -> None:
        """End the group."""
        with self._lock:
            if self._closing or self._lost.is_set():
                return
            self._lost.set()
        self._on_loss(reason, fix)

    def _beat(self) -> None:
        body = encode(Beat())
        while not self._closing:
            with self._lock:
                joined = list(self._joined.items())
            for rank, connection in joined:
                try:
                    connection.send(body)
                except GroupConnectionError:  # in a formed group the thread that reads notices it too
                    self._leave(rank, connection)
            time.sleep(BEAT_INTERVAL)

    def _leave(self, rank: int, connection: Connection) -> None:
        with self._lock:
            if not self._formed and self._joined.get(rank) is connection:
                del self._joined[rank]

    def close(self, last: Message | None = None) -> None:
        """Close all connections. `on_loss` is not called any more. last: what every follower is sent before"""
        with self._lock:
            self._closing = True
        self._listener.close()
        for connection in self._joined.values():
            if last is not None:
                with contextlib.suppress(GroupConnectionError):  # a host that is gone needs no word
                    connection.send(encode(last))
            connection.close()
