"""One engine of a server: its link, its supervisor, the requests and calls that it was sent, and what it reports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.client.processes.link import EngineLink
from jaxserve.client.processes.roles import Role
from jaxserve.client.processes.supervisor import Death, EngineStatus, Supervisor
from jaxserve.client.replicas.control_record import PAUSED
from jaxserve.client.replicas.engine_calls import EngineCalls, changes_weights
from jaxserve.client.sequences.sequence_sender import SequenceSender
from jaxserve.client.sequences.sequence_table import LiveSequence, ReplicaShare, SequenceTable
from jaxserve.errors import EngineDeadError, HTTPError
from jaxserve.routing.router import ReplicaLoad
from jaxserve.types.messages import EngineInfo, EngineStats, FromEngine, RequestRefused


class ReplicaState(NamedTuple):
    """The state of one engine, for /health, /metrics and /server_info. info: None until it was ready once"""

    engine: int
    status: EngineStatus
    alive: bool
    restarts: int
    num_live: int
    info: EngineInfo | None
    stats: EngineStats
    role: Role = "both"


class ReplicaEvents(NamedTuple):
    """What is called when something happens to a replica. See Supervisor."""

    on_message: Callable[[Replica, FromEngine | RequestRefused], None]
    on_ready: Callable[[Replica, EngineInfo], None]
    on_death: Callable[[Replica, EngineDeadError], Death]
    on_end: Callable[[Replica, EngineDeadError], None]
    end_with_error: Callable[[LiveSequence, HTTPError], None]  # ends a sequence


class Replica:
    """The engine with this index.

    role: whether it computes prompts, produces tokens, or both. is_stale: it lacks the weights of the others, so it
    gets no requests. asleep: what is not on its devices, and PAUSED; it gets none while another one is awake
    num_coming: sequences whose pages it reads, and which it will get
    """

    def __init__(
        self,
        index: int,
        link: EngineLink,
        watchdog: float,
        table: SequenceTable,
        events: ReplicaEvents,
        role: Role = "both",
    ) -> None:
        self.index = index
        self.role: Role = role
        self.link = link
        self.supervisor = Supervisor(
            link,
            watchdog=watchdog,
            on_message=functools.partial(events.on_message, self),
            on_ready=functools.partial(events.on_ready, self),
            on_death=functools.partial(events.on_death, self),
            on_end=functools.partial(events.on_end, self),
        )
        self.live = ReplicaShare(table, index)
        self.sender = SequenceSender(self.live, link.send, events.end_with_error, self.supervisor.forget_restarts)
        self.calls = EngineCalls(link.send)
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.is_stale = False
        self.asleep: frozenset[str] = frozenset()
        self.num_coming = 0

    @property
    def is_dead(self) -> bool:
        """Whether it will not be started again."""
        return self.supervisor.status.phase == "dead"

    @property
    def is_usable(self) -> bool:
        """Whether it computes a new request at once: it is ready, has the weights, and is not isolating a request."""
        return self.sender.is_up and not (self.is_stale or self.sender.is_isolating or self.is_dead)

    def note_call(self, method: str, result: Any) -> None:
        """Note what is on its devices, and whether it runs, after a call that it has carried out."""
        if method in ("sleep", "wake"):
            self.asleep = self.asleep & {PAUSED} | frozenset(result)
        elif method == "pause":
            self.asleep |= {PAUSED}
        elif method == "resume":
            self.asleep -= {PAUSED}
        elif changes_weights(method):
            self.asleep -= {"weights"}

    @property
    def load(self) -> ReplicaLoad:
        total = self.info.num_pages if self.info is not None else 0
        num_live = len(self.live) + self.num_coming
        return ReplicaLoad(self.index, num_live, self.stats.num_pages_used / total if total else 0.0)

    @property
    def state(self) -> ReplicaState:
        """What /health, /server_info and the metrics show of this replica."""
        supervisor = self.supervisor
        return ReplicaState(
            self.index,
            supervisor.status,
            supervisor.alive,
            supervisor.restarts,
            len(self.live),
            self.info,
            self.stats,
            self.role,
        )
