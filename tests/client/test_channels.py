"""The engine's ends of the wire: all that is sent comes, in order, and no more at once than a step may wait for."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from jaxserve.engine.child import SocketChannel
from jaxserve.engine.server import Channel
from jaxserve.types.messages import MAX_WEIGHT, SEQUENCE_WEIGHT, Abort, Add, ToEngine, encode
from tests.fakes import make_request
from tests.thread_link import QueueChannel

Ends = tuple[Channel, Callable[[ToEngine], None]]


@pytest.fixture(params=["socket", "queue"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    if request.param == "queue":
        loop = asyncio.new_event_loop()
        channel = QueueChannel(loop)
        yield channel, channel.to_engine.put
        loop.close()
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(kind) for kind in (zmq.PUSH, zmq.PULL)]
    for socket, name in zip(sockets, ("to-engine", "from-engine"), strict=True):
        socket.set_hwm(0)
        socket.bind(f"ipc://{tmp_path}/{name}")
    yield SocketChannel(str(tmp_path), context), lambda message: sockets[0].send(encode(message))
    context.destroy(linger=0)


def receive(channel: Channel, count: int) -> list[list[ToEngine]]:
    """What each call returned, until `count` messages have come."""
    turns: list[list[ToEngine]] = []
    while sum(map(len, turns)) < count:
        turns.append(channel.receive(10.0))
        assert turns[-1], "nothing came"
    return turns


def ids(turns: list[list[ToEngine]]) -> list[str]:
    found = {Add: lambda message: message.request.request_id, Abort: lambda message: message.request_ids[0]}
    return [found[type(message)](message) for turn in turns for message in turn]


def test_long_prompts_that_come_together_are_taken_in_a_few_at_a_time(ends: Ends) -> None:
    channel, send = ends
    prompt = [7] * 100_000
    for i in range(64):
        send(Add.of(make_request(f"r{i}", prompt)))
    send(Abort(["r3"]))
    turns = receive(channel, 65)
    assert ids(turns) == [*(f"r{i}" for i in range(64)), "r3"]
    assert max(map(len, turns)) <= MAX_WEIGHT // 400_000 + 1


def test_many_small_requests_are_taken_in_by_number(ends: Ends) -> None:
    channel, send = ends
    for i in range(600):
        send(Add.of(make_request(f"r{i}", [1])) if i % 2 else Abort([f"r{i}"]))
    turns = receive(channel, 600)
    assert ids(turns) == [f"r{i}" for i in range(600)]
    assert max(map(len, turns)) <= MAX_WEIGHT // SEQUENCE_WEIGHT


def test_siblings_count_each(ends: Ends) -> None:
    channel, send = ends
    prompt = [1]
    first = make_request("a", prompt)
    for _ in range(8):
        send(Add.of(*[first] * 128))
    assert max(map(len, receive(channel, 8))) <= 2


def test_a_prompt_of_any_length_is_taken_in(ends: Ends) -> None:
    channel, send = ends
    send(Add.of(make_request("long", [1] * (MAX_WEIGHT // 2))))
    send(Abort(["after"]))
    assert [len(turn) for turn in receive(channel, 2)] == [1, 1]


def test_nothing_comes_in_time(ends: Ends) -> None:
    channel, _ = ends
    assert channel.receive(0.01) == [] and channel.receive(0.0) == []
