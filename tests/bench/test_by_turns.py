"""Two servers by turns: a stream at each is measured."""

import asyncio
import re
import socket

import pytest

from benchmarks.by_turns import compare
from tests.api.conftest import LiveServer


def test_both_servers_are_measured() -> None:
    with LiveServer() as one, LiveServer() as other:
        ports = [int(server.url.rpartition(":")[2]) for server in (one, other)]
        lines = asyncio.run(compare(ports, "demo", 2))
    assert [line.partition(":")[0] for line in lines] == list(map(str, ports))
    assert all(re.fullmatch(r"\d+: first chunk [\d.]+ ms, a chunk [\d.]+ ms", line) for line in lines)


def test_a_server_without_streams_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.listen()
        port = listener.getsockname()[1]

        async def closed() -> None:
            asking = asyncio.create_task(compare([port], "demo", 1))
            connection, _ = await asyncio.to_thread(listener.accept)
            connection.close()
            await asking

        with pytest.raises((SystemExit, ConnectionError)):
            asyncio.run(closed())
