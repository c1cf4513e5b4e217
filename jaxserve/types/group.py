"""The messages between the processes of one engine over several hosts, as plain data.

Host 0 is the leader: it schedules, and sends each call of its runner to the followers before it makes the call itself.
Followers make the same calls in the same order.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from jaxserve.types.step import SchedulerOutput


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of the messages. The tag is the name of the class."""


# --- while the group forms


class Hello(Message, frozen=True):
    """The first message of a follower. settings: the keys that its command sets; the leader's must be equal"""

    rank: int
    num_hosts: int
    versions: dict[str, str]
    settings: dict[str, Any]


class Welcome(Message, frozen=True):
    """The leader's answer once all hosts are there.

    config: the leader's configuration as JSON. coordinator: address of jax.distributed's coordinator
    """

    config: str
    coordinator: str


class Rejected(Message, frozen=True):
    """The leader's answer to a follower that cannot be in the group."""

    reason: str


class PlanOffer(Message, frozen=True):
    """The memory plan of a host. The leader answers with a plan that fits on all hosts."""

    num_pages: int
    of_groups: tuple[int, ...]  # pages of the layer groups from 1 on
    max_model_len: int


class HostFailed(Message, frozen=True):
    """A follower's last message."""

    reason: str
    fix: str | None = None


class Beat(Message, frozen=True):
    """Shows that the sender is alive."""


# --- calls of the runner


class WarmRun(Message, frozen=True):
    """Run a program of a step on zeros."""

    family: str
    size: int


class WarmedUp(Message, frozen=True):
    """No WarmRun follows."""


class Execute(Message, frozen=True):
    """Dispatch a step."""

    output: SchedulerOutput


class Sample(Message, frozen=True):
    """Sample the masked step that was dispatched last.

    masked: the rows that have a mask. bitmask: their masks, int32 [len(masked), words], little-endian
    """

    rows: int
    words: int
    masked: tuple[int, ...]
    bitmask: bytes
    late: tuple[int, ...]

    @classmethod
    def of(cls, bitmask: np.ndarray, late: tuple[int, ...]) -> Sample:
        """Pack a bitmask, int32 [R, W]. Rows that allow every token are left out: a row of 128k tokens takes 16 KB."""
        masked = np.flatnonzero((bitmask != -1).any(axis=1))
        rows, words = bitmask.shape
        return cls(rows, words, tuple(masked.tolist()), bitmask[masked].astype("<i4").tobytes(), late)

    def array(self) -> np.ndarray:
        """Return the bitmask, int32 [R, W]."""
        whole = np.full((self.rows, self.words), -1, np.int32)
        whole[list(self.masked)] = np.frombuffer(self.bitmask, "<i4").reshape(-1, self.words)
        return whole


class Operation(Message, frozen=True):
    """A rarer call, which the follower answers with Done. name: a method of `engine.hosts.following.Operations`."""

    name: str
    args: dict[str, Any] = {}


class Done(Message, frozen=True):
    """The end of an Operation. error: None if it succeeded."""

    error: str | None = None


class LeaderEnds(Message, frozen=True):
    """The leader ends because it was asked to."""


ToFollower = Welcome | Rejected | PlanOffer | Beat | WarmRun | WarmedUp | Execute | Sample | Operation | LeaderEnds
ToLeader = Hello | PlanOffer | HostFailed | Beat | Done

_to_follower: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(ToFollower)
_to_leader: msgspec.msgpack.Decoder[ToLeader] = msgspec.msgpack.Decoder(ToLeader)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_follower(body: bytes) -> ToFollower:
    """Decode a message of the leader. Raises msgspec.MsgspecError for anything else."""
    return _to_follower.decode(body)


def decode_to_leader(body: bytes) -> ToLeader:
    """Decode a message of a follower. Raises msgspec.MsgspecError for anything else."""
    return _to_leader.decode(body)
