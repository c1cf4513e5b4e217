"""The connections of a group of hosts: real sockets, strangers, and losses."""

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from jaxserve.errors import ConfigError
from jaxserve.transport import group as leader_module
from jaxserve.transport.group import Connection, FollowerEnd, GroupConnectionError, HostLostError, LeaderEnd, connect
from jaxserve.types.group import Done, Hello, LeaderEnds, Operation, Rejected, WarmRun, encode
from tests.waiting import LAST_RESORT, wait_until

KEY = b"a secret of the group"
LOOPBACK = ("127.0.0.1", 0)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(LOOPBACK) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def pair(leads: bytes = KEY, follows: bytes = KEY) -> tuple[Connection, Connection]:
    """Both ends of an authenticated connection. Raises what the leader's end raises."""
    one, other = tcp_pair()
    ends: list[Connection | Exception] = []

    def follow() -> None:
        try:
            ends.append(Connection.open(other, follows, leads=False, timeout=LAST_RESORT))
        except GroupConnectionError as error:
            ends.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        leading = Connection.open(one, leads, leads=True, timeout=LAST_RESORT)
    except GroupConnectionError:
        one.close()
        raise
    finally:
        thread.join()
        if not ends or isinstance(ends[0], Exception):
            other.close()
    (following,) = ends
    assert isinstance(following, Connection)
    return leading, following


def test_frames_arrive_in_order_in_both_directions() -> None:
    leading, following = pair()
    for body in (b"", b"a", b"b" * 100_000):
        thread = threading.Thread(target=leading.send, args=(body,))
        thread.start()
        assert following.receive() == body
        thread.join()
    following.send(b"back")
    assert leading.receive() == b"back"
    leading.close()
    with pytest.raises(GroupConnectionError, match="closed the connection"):
        following.receive()
    following.close()


def test_another_key_is_refused() -> None:
    with pytest.raises(GroupConnectionError, match="another key"):
        pair(follows=b"not the secret of it")


@pytest.mark.parametrize("change", ["bit", "twice", "swapped"])
def test_frames_that_are_changed_on_the_way_are_refused(change: str) -> None:
    """Between two authenticated ends sits somebody who sees all bytes and knows no key."""
    one, near = tcp_pair()
    far, other = tcp_pair()
    ends: list[Connection] = []
    opening = [
        threading.Thread(target=lambda s=s, leads=leads: ends.append(Connection.open(s, KEY, leads=leads, timeout=9)))
        for s, leads in ((one, True), (other, False))
    ]
    for thread in opening:
        thread.start()
    for source, target, size in ((near, far, 32), (far, near, 64), (near, far, 32)):  # random numbers and proofs
        data = b""
        while len(data) < size:
            data += source.recv(size - len(data))
        target.sendall(data)
    for thread in opening:
        thread.join()
    leading, following = sorted(ends, key=lambda end: end._stream is not one)
    frames = []
    for body in (b"first", b"other"):
        leading.send(body)
        frames.append(near.recv(4 + 32 + len(body)))
    flipped = frames[0][:-1] + bytes([frames[0][-1] ^ 1])
    far.sendall({"bit": flipped, "twice": frames[0] + frames[0], "swapped": frames[1]}[change])
    if change == "twice":
        assert following.receive() == b"first"
    with pytest.raises(GroupConnectionError, match="wrong code"):
        following.receive()
    for each in (leading, following):
        each.close()
    for stream in (near, far):
        stream.close()


class Joined:
    """A leader and what it lost."""

    def __init__(self, num_hosts: int = 2, objection: str | None = None) -> None:
        self.lost: list[str] = []
        self.end = LeaderEnd(
            LOOPBACK, KEY, num_hosts, lambda hello: objection, lambda reason, fix: self.lost.append(reason)
        )
        self.followers: list[FollowerEnd] = []
        self.followers_lost: list[str] = []

    def join(self, rank: int) -> FollowerEnd:
        connection = connect(("127.0.0.1", self.end.port), KEY, lambda _: None)
        follower = FollowerEnd(connection, Hello(rank, 2, {}, {}), self.followers_lost.append)
        self.followers.append(follower)
        return follower

    def close(self) -> None:
        self.end.close()
        for follower in self.followers:
            follower.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Joined]]:
    made: list[Joined] = []

    def one(*args: object) -> Joined:
        made.append(Joined(*args))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_messages_reach_every_follower_in_order(make: Callable[..., Joined]) -> None:
    group = make(3)
    first, second = group.join(1), group.join(2)
    group.end.gather(LAST_RESORT)
    for size in range(5):
        group.end.send(WarmRun("decode", size))
    group.end.send(Operation("rebuild"))
    for follower in (first, second):
        assert [follower.receive() for _ in range(5)] == [WarmRun("decode", size) for size in range(5)]
        assert follower.receive() == Operation("rebuild")
    first.send(Done())
    second.send(Done("no memory"))
    assert group.end.answers(LAST_RESORT) == {1: Done(), 2: Done("no memory")}
    assert group.lost == group.followers_lost == []


def test_hosts_that_do_not_come_are_named(make: Callable[..., Joined]) -> None:
    group = make(4)
    group.join(2)
    with pytest.raises(ConfigError, match=r"these of 4 hosts have not joined: 1, 3"):
        group.end.gather(0.3)


def test_a_host_that_starts_again_takes_its_own_place(make: Callable[..., Joined]) -> None:
    group = make(3)
    group.join(1)
    wait_until(lambda: 1 in group.end._joined, "it has joined")
    again = group.join(1)
    wait_until(lambda: group.followers_lost, "the first one is closed")
    group.join(2)
    group.end.gather(LAST_RESORT)
    group.end.send(LeaderEnds())
    assert again.receive() == LeaderEnds()


def test_a_host_that_cannot_be_in_the_group_is_told_why(make: Callable[..., Joined]) -> None:
    group = make(2, "another version")
    follower = group.join(1)
    assert follower.receive() == Rejected("another version")
    wait_for_readers()
    assert not group.followers_lost  # the end of the connection is not taken for a loss


def wait_for_readers() -> None:
    """Until the followers have read all that their leaders sent."""
    for reader in [thread for thread in threading.enumerate() if thread.name == "leader"]:
        reader.join(LAST_RESORT)


def test_the_end_of_a_leader_that_was_asked_to_end_is_no_loss(make: Callable[..., Joined]) -> None:
    group = make(2)
    follower = group.join(1)
    group.end.gather(LAST_RESORT)
    group.end.close(LeaderEnds())
    wait_for_readers()
    assert follower.receive() == LeaderEnds()
    assert not group.followers_lost


def test_hosts_join_after_a_moment_without_descriptors(
    make: Callable[..., Joined], caplog: pytest.LogCaptureFixture
) -> None:
    group = make(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as stranger:
        lowest = os.dup(stranger.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            stranger.connect(("127.0.0.1", group.end.port))
            wait_until(lambda: "Too many open files" in caplog.text, "no connection can be accepted")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    group.join(1)
    group.end.gather(LAST_RESORT)


def test_strangers_do_not_keep_the_group_from_forming(make: Callable[..., Joined]) -> None:
    group = make(2)
    silent = [socket.create_connection(("127.0.0.1", group.end.port)) for _ in range(3)]
    loud = socket.create_connection(("127.0.0.1", group.end.port))
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    follower = group.join(1)
    group.end.gather(LAST_RESORT)
    group.end.send(LeaderEnds())
    assert follower.receive() == LeaderEnds()
    for each in (*silent, loud):
        each.close()


def test_each_side_notices_the_end_of_the_other(make: Callable[..., Joined]) -> None:
    group = make(2)
    follower = group.join(1)
    group.end.gather(LAST_RESORT)
    follower.close()
    wait_until(lambda: group.lost, "the leader notices it")
    assert group.lost[0].startswith("host 1 is lost: ")
    with pytest.raises(HostLostError, match="host 1"):
        group.end.answers(LAST_RESORT)
    other = make(2)
    other.join(1)
    other.end.gather(LAST_RESORT)
    other.end.close()
    wait_until(lambda: other.followers_lost, "the follower notices it")
    assert other.lost == []


def test_a_silent_host_is_lost(make: Callable[..., Joined], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "SILENCE_LIMIT", 0.3)
    group = make(2)
    stream = socket.create_connection(("127.0.0.1", group.end.port))
    silent = Connection.open(stream, KEY, leads=False, timeout=LAST_RESORT)
    silent.send(encode(Hello(1, 2, {}, {})))  # and no Beat
    group.end.gather(LAST_RESORT)
    wait_until(lambda: group.lost, "the leader notices it")
    assert "timed out" in group.lost[0]
    silent.close()


def test_a_host_that_does_not_answer_ends_the_group(make: Callable[..., Joined]) -> None:
    group = make(2)
    group.join(1)
    group.end.gather(LAST_RESORT)
    with pytest.raises(HostLostError, match="host 1 does not answer"):
        group.end.answers(0.1)
    assert group.lost == ["host 1 does not answer"]


def test_a_follower_waits_for_its_leader() -> None:
    with socket.create_server(LOOPBACK) as probe:
        port = probe.getsockname()[1]
    failures: list[str] = []
    found: list[Connection] = []
    thread = threading.Thread(target=lambda: found.append(connect(("127.0.0.1", port), KEY, failures.append)))
    thread.start()
    wait_until(lambda: failures, "it has tried")
    end = LeaderEnd(("127.0.0.1", port), KEY, 2, lambda hello: None, lambda reason, fix: None)
    thread.join(LAST_RESORT)
    assert found and "refused" in failures[0]
    end.close()
    found[0].close()


def test_the_leader_listens_at_its_address_only() -> None:
    end = LeaderEnd(LOOPBACK, KEY, 2, lambda hello: None, lambda reason, fix: None)
    assert end._listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{end.port}"):
        LeaderEnd(("127.0.0.1", end.port), KEY, 2, lambda hello: None, lambda reason, fix: None)
    end.close()
