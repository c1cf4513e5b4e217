"""The engines of one server as parts: one engine, the choice among several, and several engines as one.

    Replica         an engine: its link, its supervisor, the requests and calls that it was sent, and its reports
    ReplicaChoice   chooses the replica that computes a request; the router chooses among the usable ones of a role
    joined_...      properties, statistics, status and answers of several engines as one

With roles (link.py)                                   computed by
the prompt lacks few pages in the best decode engine   this decode engine
the answer ends with the prompt                        a prefill engine
all others                                             a prefill engine, then a decode engine (prompt_handover.py)
no engine of one role serves                           an engine of the other role
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from jaxserve.client.control import Calls
from jaxserve.client.link import EngineLink, Role, Roles, ends_with_prompt
from jaxserve.client.sequence_sender import SequenceSender
from jaxserve.client.sequences import LiveSequence, ReplicaShare, SequenceTable
from jaxserve.client.supervisor import Death, EngineStatus, Supervisor
from jaxserve.errors import EngineDeadError, HTTPError
from jaxserve.routing.router import ReplicaLoad, Router
from jaxserve.types.calls import EngineCall
from jaxserve.types.messages import AdapterStatus, EngineInfo, EngineStats, FromEngine, RequestRefused
from jaxserve.types.page_keys import TOKEN_BYTES
from jaxserve.types.sampling import BACKGROUND_PRIORITY, EngineRequest
from jaxserve.types.step import DraftCounters


class ReplicaState(NamedTuple):
    """The state of one engine for /health, /metrics and /server_info. info: None until it was ready once"""

    engine: int
    status: EngineStatus
    alive: bool
    restarts: int
    num_live: int
    info: EngineInfo | None
    stats: EngineStats
    role: Role = "both"


class ReplicaEvents(NamedTuple):
    """Callbacks of a replica. See Supervisor."""

    on_message: Callable[[Replica, FromEngine | RequestRefused], None]
    on_ready: Callable[[Replica, EngineInfo], None]
    on_death: Callable[[Replica, EngineDeadError], Death]
    on_end: Callable[[Replica, EngineDeadError], None]
    end_with_error: Callable[[LiveSequence, HTTPError], None]  # ends a sequence


class Replica:
    """The engine with this index.

    role: whether it computes prompts, produces tokens, or both
    is_stale: it lacks the weights of the others, so it gets no requests
    asleep: names of the parts that are not on its devices, and PAUSED; it gets no requests while another one is awake
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
        self.calls: Calls[EngineCall] = Calls(link.send)
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

    def has_adapter(self, digest: str) -> bool:
        """Return whether it said that an adapter is loaded."""
        return any(each.digest == digest for each in self.stats.adapters)

    @property
    def load(self) -> ReplicaLoad:
        total = self.info.num_pages if self.info is not None else 0
        num_live = len(self.live) + self.num_coming
        return ReplicaLoad(self.index, num_live, self.stats.num_pages_used / total if total else 0.0)

    @property
    def state(self) -> ReplicaState:
        """The state of this replica for /health, /server_info and the metrics."""
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


class ReplicaChoice:
    """Chooses the replica of each request. router: None until the page size is known, or if there is one replica"""

    def __init__(self, replicas: Sequence[Replica], roles: Roles) -> None:
        self._replicas = replicas
        self._roles = roles
        self.router: Router | None = None

    def of_request(self, request: EngineRequest, prompt: bytes, *, at_first: bool = True) -> Replica:
        """Return the replica for a request.

        prompt: token ids, int32, little-endian. at_first: it was in no replica yet, so the replica that it names is
        used
        """
        if len(self._replicas) == 1:
            return self._replicas[0]
        if at_first and request.replica is not None:
            return self._replicas[request.replica]
        if not self._roles.num_prefill:
            return self._best(self._replicas, request, prompt)
        prefill, decode = self._usable("prefill"), self._usable("decode")
        if not (prefill and decode):
            return self._best(prefill or decode or self._replicas, request, prompt)
        if ends_with_prompt(request.params):
            return self._best(prefill, request, prompt)
        target = self._best(decode, request, prompt)
        is_short = self._num_missing(target, request, prompt) < self._roles.min_tokens
        return target if is_short else self._best(prefill, request, prompt)

    def of_decode(self, request: EngineRequest) -> Replica:
        """Return the replica that goes on with a request whose prompt is computed."""
        replicas = self._usable("decode") or self._usable("prefill") or self._replicas
        return self._best(replicas, request, prompt_bytes(request))

    def passes_on(self, replica: Replica, request: EngineRequest) -> bool:
        """Return whether a replica only computes the prompt of a request, which then goes on in another."""
        if replica.role != "prefill" or request.replica == replica.index or ends_with_prompt(request.params):
            return False
        return bool(self._usable("decode"))

    def _usable(self, role: Role) -> list[Replica]:
        return [each for each in usable(self._replicas) if each.role == role]

    def _num_missing(self, replica: Replica, request: EngineRequest, prompt: bytes) -> int:
        """Return how many tokens of a prompt a replica would have to compute."""
        num_cached = 0 if self.router is None else self.router.num_cached(replica.index, prompt, request.namespace)
        return len(prompt) // TOKEN_BYTES - num_cached

    def _best(self, replicas: Sequence[Replica], request: EngineRequest, prompt: bytes) -> Replica:
        found = _candidates(replicas)
        if request.adapter:  # of a partly failed load, or files that changed before an engine was started again
            found = [each for each in found if each.has_adapter(request.adapter)] or found
        if self.router is None:
            return found[0]
        loads = [replica.load for replica in found]
        batch = request.priority >= BACKGROUND_PRIORITY
        return self._replicas[self.router.choose(loads, prompt, request.namespace, batch=batch)]


def prompt_bytes(request: EngineRequest) -> bytes:
    """Return the prompt of a request as the router reads it."""
    end = request.pictures[0].start if request.pictures else None  # pages with pictures have keys of another form
    return array("i", request.prompt_token_ids[:end]).tobytes()


def usable(replicas: Sequence[Replica]) -> list[Replica]:
    """Return the usable replicas that are awake; all usable ones if none is awake."""
    found = [replica for replica in replicas if replica.is_usable]
    return [replica for replica in found if not replica.asleep] or found


def _candidates(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Return the replicas that may get a request, of the best kind that there is."""
    living = [replica for replica in replicas if not replica.is_dead]
    found = usable(living)
    kinds = (
        [replica for replica in found if replica.supervisor.beats],
        found,
        [replica for replica in living if not (replica.is_stale or replica.sender.is_isolating)],
        living,
        replicas,
    )
    return next(kind for kind in kinds if kind)


_SUMMED_INFO = ("num_pages", "max_num_seqs", "useful_rows")
_NOT_SUMMED = ("weight_version", "step_sizes", "drafts", "adapters", "details")
_LARGEST = ("paused", "asleep", "weight_updates", "new_token_ratio")  # of `details`


def joined_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the properties of all engines together. Their capacities are added up."""
    first = infos[0]
    if len(infos) == 1:
        return first
    sums = {name: sum(getattr(info, name) for info in infos) for name in _SUMMED_INFO}
    devices = [device for info in infos for device in info.devices]
    length = min(info.max_model_len for info in infos)
    return msgspec.structs.replace(first, **sums, devices=devices, max_model_len=length)


def joined_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the statistics of all engines together."""
    if len(stats) == 1:
        return stats[0]
    names = [name for name in EngineStats.__struct_fields__ if name not in _NOT_SUMMED]
    details: dict[str, float] = {}
    for name in dict.fromkeys(name for each in stats for name in each.details):
        values = [each.details.get(name, 0.0) for each in stats]
        details[name] = max(values) if name in _LARGEST else sum(values)
    return EngineStats(
        **{name: sum(getattr(each, name) for each in stats) for name in names},
        weight_version=stats[0].weight_version,
        step_sizes=_added([each.step_sizes for each in stats]),
        drafts=_joined_drafts([each.drafts for each in stats if each.drafts is not None]),
        adapters=_joined_adapters(stats),
        details=details,
    )


def _joined_adapters(stats: Sequence[EngineStats]) -> list[AdapterStatus]:
    """Return the adapters that any engine has, with their requests in all engines."""
    found: dict[str, AdapterStatus] = {}
    for each in (adapter for one in stats for adapter in one.adapters):
        before = found.get(each.name)
        if before is not None:
            running, waiting = before.num_running + each.num_running, before.num_waiting + each.num_waiting
            each = msgspec.structs.replace(before, num_running=running, num_waiting=waiting)
        found[each.name] = each
    return [*found.values()]


def _added(lists: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, lists))
    return [sum(each[index] for each in lists if index < len(each)) for index in range(longest)]


def _joined_drafts(drafts: Sequence[DraftCounters]) -> DraftCounters | None:
    if not drafts:
        return None
    return DraftCounters(
        sum(each.num_drafts for each in drafts),
        sum(each.num_draft_tokens for each in drafts),
        _added([each.accepted_per_pos for each in drafts]),
        sum(each.num_rest_steps for each in drafts),
    )


def joined_status(statuses: Sequence[EngineStatus], *, started: bool) -> EngineStatus:
    """Return the status of the server.

    started: every engine was ready once. Until then the server is loading, and an engine that cannot start ends it.
    Afterwards it is ready while one engine is.
    """
    if len(statuses) == 1:
        return statuses[0]
    dead = [status for status in statuses if status.phase == "dead"]
    if len(dead) == len(statuses) or (dead and not started):
        return dead[0]
    for phase in ("draining", "ready") if started else ("draining", "loading"):
        if found := [status for status in statuses if status.phase == phase]:
            return min(found, key=lambda status: status.done)
    left = next(status for status in statuses if status.phase not in ("dead", "ready"))
    return left if started else EngineStatus("loading", left.detail, left.done, left.total, left.unit)
