"""The connections of a group: the processes of one engine on several hosts. Frames are not interpreted below the ends.

    FrameStream   length-prefixed frames over one stream socket between two event loops
    Connection    a TCP connection between two hosts of a group that know the same key
    LeaderEnd     takes the followers in, sends them every message, and notices the loss of one
    FollowerEnd   connects to the leader, as often as it takes, and receives its messages in order

When a Connection is made, each side proves with a fresh random number that it knows the key. After that each frame has
a number and a code made with a key of this connection, so that no other machine can add, change, repeat or reorder
frames. Frames are not encrypted, because the values that the devices exchange beside them are not encrypted either.

The leader has one receiving thread per follower. If a follower is lost, `on_loss` is called once, in such a thread; it
should end the process, because the devices of the group can do nothing without the follower's. A follower also receives
in a thread, so that it notices the loss of the leader while a step is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from jaxserve.errors import ConfigError, JaxserveError, ServerError
from jaxserve.transport.child import HEAD_BYTES, frame_size, framed
from jaxserve.types.group import (
    Beat,
    Done,
    Hello,
    HostFailed,
    LeaderEnds,
    Message,
    PlanOffer,
    Rejected,
    ToFollower,
    decode_to_follower,
    decode_to_leader,
    encode,
)

logger = logging.getLogger(__name__)


class FrameStream(asyncio.Protocol):
    """One end of a connection.

    on_frame: called with the body of each frame; an exception closes the connection
    on_end: called once, after the other end has closed or died
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is not a subclass of asyncio's

    def send(self, body: bytes) -> None:
        """Send a frame. It is kept in memory until the other end reads it, and dropped if that has closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(body))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take in bytes. Raises ValueError if a frame is too large, which closes the connection."""
        self._received += data
        start, end = 0, len(self._received)
        while end - start >= HEAD_BYTES:
            stop = start + HEAD_BYTES + frame_size(bytes(self._received[start : start + HEAD_BYTES]))
            if stop > end:
                break
            self._on_frame(bytes(self._received[start + HEAD_BYTES : stop]))
            start = stop
        if start:
            del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()


NONCE_BYTES = 32
CODE_BYTES = 32
MAX_FRAME = 128 * 2**20  # bytes
_HEAD = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_HASH = "sha256"


class GroupConnectionError(JaxserveError):
    """The other host is gone, does not know the key, or sent something invalid."""


class Connection:
    """One end of a connection, made by `open`. Several threads may send frames, and one may receive them."""

    def __init__(self, stream: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._stream = stream
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self._sending = threading.Lock()

    @classmethod
    def open(cls, stream: socket.socket, key: bytes, *, leads: bool, timeout: float) -> Connection:
        """Authenticate both sides of a new connection within `timeout` seconds, and return this end.

        leads: whether this is the leader's end. Raises GroupConnectionError.
        """
        stream.settimeout(timeout)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own = secrets.token_bytes(NONCE_BYTES)
            stream.sendall(own)
            other = _read(stream, NONCE_BYTES)
            nonces = own + other if leads else other + own
            mine, theirs = (b"leader", b"follower") if leads else (b"follower", b"leader")
            # The follower proves itself first, so a stranger who connects gets nothing to guess the key from.
            if leads:
                _check_proof(stream, key, theirs + nonces)
            stream.sendall(hmac.digest(key, mine + nonces, _HASH))
            if not leads:
                _check_proof(stream, key, theirs + nonces)
        except OSError as error:
            raise GroupConnectionError(f"no connection: {error}") from error
        stream.settimeout(None)
        frames = b" frames" + nonces
        return cls(stream, hmac.digest(key, mine + frames, _HASH), hmac.digest(key, theirs + frames, _HASH))

    def limit(self, seconds: float | None) -> None:
        """Let each read or write fail if nothing moves for `seconds`."""
        self._stream.settimeout(seconds)

    def send(self, body: bytes) -> None:
        """Send a frame. Raises GroupConnectionError."""
        if len(body) > MAX_FRAME:
            raise GroupConnectionError(f"a frame of {len(body)} bytes is too large")
        with self._sending:
            code = hmac.digest(self._send_key, _NUMBER.pack(self._sent) + body, _HASH)
            self._sent += 1
            try:
                self._stream.sendall(_HEAD.pack(len(body)) + code + body)
            except OSError as error:
                raise GroupConnectionError(f"the connection is gone: {error}") from error

    def receive(self) -> bytes:
        """Return the next frame. Raises GroupConnectionError."""
        try:
            head = _read(self._stream, _HEAD.size + CODE_BYTES)
            (size,) = _HEAD.unpack_from(head)
            if size > MAX_FRAME:
                raise GroupConnectionError(f"a frame of {size} bytes is too large")
            body = _read(self._stream, size)
        except OSError as error:
            raise GroupConnectionError(f"the connection is gone: {error}") from error
        code = hmac.digest(self._receive_key, _NUMBER.pack(self._received) + body, _HASH)
        self._received += 1
        if not hmac.compare_digest(code, head[_HEAD.size :]):
            raise GroupConnectionError("a frame has a wrong code")
        return body

    def close(self) -> None:
        """Close the connection. A thread in `receive` gets GroupConnectionError."""
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was quicker
        self._stream.close()


def _check_proof(stream: socket.socket, key: bytes, message: bytes) -> None:
    if not hmac.compare_digest(_read(stream, CODE_BYTES), hmac.digest(key, message, _HASH)):
        raise GroupConnectionError("the other side has another key")


def _read(stream: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = stream.recv_into(view)
        if not count:
            raise GroupConnectionError("the other side closed the connection")
        view = view[count:]
    return bytes(data)


HANDSHAKE_LIMIT = 10.0  # seconds that a new connection has to prove itself and say who it is
MAX_HANDSHAKES = 32  # at once; further connections are closed
BEAT_INTERVAL = 1.0  # seconds
SILENCE_LIMIT = 30.0  # seconds without a frame after which the other host counts as lost
TICK_INTERVAL = 0.5  # seconds between two calls of `tick` while followers are waited for
ACCEPT_DELAY = 0.5  # seconds until connections are accepted again after an error

Check = Callable[[Hello], str | None]  # why a follower cannot be in the group; None: it can
OnLoss = Callable[[str, str | None], None]  # (what happened, what to do about it)


class HostLostError(ServerError):
    """A host of the group is gone or does not answer. A call that fails for it has status 500."""


class LeaderEnd:
    """The connections of the leader to its followers.

    address: the only address to listen on. num_hosts: number of hosts, the leader included. check: called with the
    Hello of each new follower
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

        on_progress: called with the number of hosts that have joined, each time that it changes
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
            except OSError as error:  # the socket was closed, the connection ended, or no file descriptor is free
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
        """Wait for one answer of each follower and return them by rank. Raises HostLostError.

        tick: called every TICK_INTERVAL while it waits
        """
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
        """End the group and call `on_loss`, once."""
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
        """Close all connections. `on_loss` is not called any more. last: message that every follower gets before"""
        with self._lock:
            self._closing = True
        self._listener.close()
        for connection in self._joined.values():
            if last is not None:
                with contextlib.suppress(GroupConnectionError):  # a host that is gone needs no word
                    connection.send(encode(last))
            connection.close()


RETRY_DELAY = 0.5  # seconds between two tries to connect


def connect(address: tuple[str, int], key: bytes, on_failure: Callable[[str], None]) -> Connection:
    """Connect to the leader, which may not run yet. Tries until it succeeds. on_failure: called after each failure"""
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

    A leader that sent Rejected or LeaderEnds closes the connection. That is not a loss: the process ends as the message
    says.
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
        """Wait for the next message of the leader and return it. Beats are skipped."""
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
