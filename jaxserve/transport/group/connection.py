"""A TCP connection between two hosts of a group that know the same key. Does not interpret the frames.

When it is made, each side proves with a fresh random number that it knows the key. After that each frame has a number
and a code made with a key of this connection, so that no other machine can add, change, repeat or reorder
frames. Frames are not encrypted: the numbers that the devices exchange beside them are not either.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading

from jaxserve.errors import JaxserveError

NONCE_BYTES = 32
CODE_BYTES = 32
MAX_FRAME = 128 * 2**20  # bytes
_HEAD = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_HASH = "sha256"


class GroupConnectionError(JaxserveError):
    """The other host is gone, does not know the key, or sent something invalid."""


class Connection:
    """One end. `open` makes it. Frames may be sent by several threads, and received by one."""

    def __init__(self, stream: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._stream = stream
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self._sending = threading.Lock()

    @classmethod
    def open(cls, stream: socket.socket, key: bytes, *, leads: bool, timeout: float) -> Connection:
        """Authenticate both sides of a new connection, within `timeout` seconds.

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
            # The follower proves itself first: a stranger who connects gets nothing to guess the key from.
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
