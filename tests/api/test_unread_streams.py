"""Streams whose clients do not read, over real sockets: what is held for them has a bound, and then they end."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.api.unread_streams import STREAMS_IN_TOTAL, UnreadStreams
from jaxserve.config import Config
from jaxserve.errors import SlowReaderError
from tests.waiting import LAST_RESORT, wait_until

from .conftest import LiveServer, reply_with

BOUND = 64 * 2**10
CHOICES = 32  # 20 MB of events: the sockets themselves take in 4
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "demo",
        "prompt": "Hi",
        "n": CHOICES,
        "logprobs": 20,
        "max_tokens": 400,
        "stream": True,
    },
    "/v1/chat/completions": {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hi"}],
        "n": CHOICES,
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 400,
        "stream": True,
    },
    "/generate": {
        "text": ["Hi", "Ho"],
        "sampling_params": {"n": CHOICES // 2, "max_new_tokens": 400},
        "return_logprob": True,
        "top_logprobs_num": 20,
        "stream": True,
    },
}


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    with LiveServer(Config().replace(server={"max_unread_bytes": BOUND})) as server:
        reply_with(server, [300 + number for number in range(400)])
        yield server


def unread(server: LiveServer, path: str) -> socket.socket:
    """A stream that is asked for and not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(LAST_RESORT)
    connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    data = json.dumps(ROUTES[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nhost:\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def events(connection: socket.socket) -> list[str]:
    """The stream to its end. Frames of the chunked coding are dropped."""
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        part = connection.recv(2**16)
        assert part, "the stream was cut"
        data += part
    return [line.strip() for line in data.decode().split("\r\n") if line.startswith("data: ")]


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_that_nobody_reads_ends_at_the_bound(strict: LiveServer, path: str) -> None:
    link, engine, streams = strict.link, strict.engine, strict.app.state.server.unread
    link.delay = 0.002
    strict.call(link.hold.set)

    def too_much() -> bool:
        """Stops the engine there: what then ends the request is the bound, if it has not yet."""
        if sum(streams.held().values()) <= BOUND and engine.num_live:
            return False
        link.hold.clear()
        return True

    with unread(strict, path) as connection:
        strict.wait(lambda: engine.num_live == CHOICES, "the request runs")
        strict.wait(too_much, "more is held than the bound")
        strict.wait(lambda: engine.num_live == 0, "its sequences ended")
        *_, error, done = events(connection)
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "stream_not_read"
    assert 'code="stream_not_read"' in strict.http.get("/metrics").text


def test_a_stream_that_is_read_is_whole(strict: LiveServer) -> None:
    """What counts is what waits for the client, and not how long the stream is."""
    link = strict.link
    strict.call(link.hold.set)
    link.delay = 0.001
    with strict.http.stream("POST", "/v1/completions", json=ROUTES["/v1/completions"]) as response:
        lines = [line for line in response.iter_lines() if line]
    link.delay = 0.0
    assert lines[-1] == "data: [DONE]" and '"error"' not in "".join(lines)
    assert sum('"finish_reason":"length"' in line for line in lines) == CHOICES


class FakeStream:
    def __init__(self, held: int, *, paused: bool = True) -> None:
        self.held, self.paused = held, paused
        self.error: SlowReaderError | None = None

    def held_bytes(self) -> int:
        return self.held

    def end_with(self, error: SlowReaderError) -> None:
        self.error = error


def test_all_together_have_a_bound_too(strict: LiveServer) -> None:
    """The largest end first. A stream whose client reads is not asked."""
    errors: list[SlowReaderError] = []
    small = [FakeStream(BOUND // 2) for _ in range(2 * STREAMS_IN_TOTAL)]
    large = [FakeStream(BOUND - 1), FakeStream(BOUND)]
    reading = FakeStream(100 * BOUND, paused=False)

    def add() -> UnreadStreams:
        streams = UnreadStreams(BOUND, errors.append)
        for stream in (*small, *large, reading):
            streams.add(stream)
        return streams

    streams = strict.call(add)
    wait_until(lambda: errors, "the bound was looked at")
    strict.call(lambda: None)
    assert all(stream.error is not None for stream in large)
    assert not any(stream.error for stream in (*small, reading)) and len(errors) == 2
    strict.call(lambda: [streams.remove(stream) for stream in (*small, reading)])
