"""The engines of one server, each supervised alone: which one computes a request, and what happens if one dies.

A request goes to the replica that the router chooses, with all its choices. If a replica dies, its requests go on in
the others at once: they are sent with their prompt, their seed and the tokens that they have.

Any request that was in work when a replica died may have killed it. If it is in work at the death of a second replica,
it stays with that one until the search for the culprit is over (sequence_sender.py), and all others leave. So a request
that crashes engines crashes at most three times, two engines and then one of them again while it runs alone, and fails.
With one replica the search begins at the first death.

With one link this is one engine, with the behaviour of one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.client.control import ControlRecord
from jaxserve.client.finishing import FinishingPause
from jaxserve.client.link import EngineLink, Roles
from jaxserve.client.prompt_handover import PromptHandover
from jaxserve.client.replica_calls import call_all
from jaxserve.client.replicas import (
    Replica,
    ReplicaChoice,
    ReplicaEvents,
    ReplicaState,
    joined_info,
    joined_stats,
    joined_status,
    prompt_bytes,
    usable,
)
from jaxserve.client.sequence_sender import SERVED
from jaxserve.client.sequences import NOWHERE, HeldDeadlines, LiveSequence, SequenceTable
from jaxserve.client.supervisor import Death, EngineStatus
from jaxserve.errors import ConfigError, EngineDeadError, HTTPError, InvalidValueError, ServerError
from jaxserve.routing.router import Router
from jaxserve.types.calls import EngineCall, LoadAdapter, Pause, Update, UpdateFromFile
from jaxserve.types.messages import (
    Abort,
    AdapterStatus,
    Add,
    EngineInfo,
    EngineStats,
    FromEngine,
    RequestRefused,
    with_measured,
)
from jaxserve.types.page_keys import PageEvents
from jaxserve.types.step import TokenOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SequenceEvents:
    """Callbacks to the owner of the sequences.

    on_message      called with each message that concerns requests, and the replica that sent it
    answer_abort    answers the abort of a sequence whose replica died
    end_with_error  ends a sequence with an error
    fail_all        ends all sequences, because no replica is left
    """

    on_message: Callable[[Replica, FromEngine | RequestRefused], None]
    answer_abort: Callable[[LiveSequence], None]
    end_with_error: Callable[[LiveSequence, HTTPError], None]
    fail_all: Callable[[HTTPError], None]


class ReplicaSet:
    """Sends each sequence to a replica, and to another one if that dies.

    live: the accepted sequences of all replicas
    """

    def __init__(
        self,
        links: Sequence[EngineLink],
        watchdog: float,
        live: SequenceTable,
        roles: Roles,
        events: SequenceEvents,
    ) -> None:
        self._live = live
        self._events = events
        self._record = ControlRecord()
        own = ReplicaEvents(events.on_message, self._became_ready, self._died, self._ended, events.end_with_error)
        self._replicas = [Replica(i, link, watchdog, live, own, roles.of(i)) for i, link in enumerate(links)]
        self._choice = ReplicaChoice(self._replicas, roles)
        self._handover = PromptHandover(live, self._choice.of_decode, self._go_on) if roles.num_prefill else None
        self._finishing = FinishingPause(live, self._replicas, self._record)
        self._updating = asyncio.Lock()  # one update at a time: a label is the number of updates before it
        self._info: EngineInfo | None = None
        self._deadlines = HeldDeadlines(live, events.end_with_error, self.advance)
        self._watching: asyncio.Task[None] | None = None  # of the deadlines

    # -- start and stop ------------------------------------------------------------------------------------

    def load_first(self, adapters: Sequence[AdapterStatus]) -> None:
        """See AsyncEngine."""
        for each in adapters:
            call = LoadAdapter(each.name, each.path, replace=True, pinned=each.pinned, digest=each.digest)
            self._record.record(call, None)
        for replica in self._replicas:
            replica.stats = EngineStats(adapters=[*adapters])

    def start(self) -> None:
        """Start all engines. Raises ConfigError."""
        if self._handover is not None:
            self._handover.start()
        for replica in self._replicas:
            replica.supervisor.start()
        self._watching = asyncio.create_task(self._deadlines.run())

    def drain(self) -> None:
        """Show the status `draining` from now on."""
        for replica in self._replicas:
            replica.supervisor.drain()

    async def stop(self) -> None:
        """Stop all engines."""
        if self._watching is not None:
            self._watching.cancel()
        if self._handover is not None:
            await self._handover.stop()
        await asyncio.gather(*(replica.supervisor.stop() for replica in self._replicas))

    async def next_status(self) -> EngineStatus:
        """Return the status after the next change of any engine."""
        if len(self._replicas) == 1:
            await self._replicas[0].supervisor.changed.wait()
            return self.status
        waits = [asyncio.ensure_future(replica.supervisor.changed.wait()) for replica in self._replicas]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self.status

    # -- properties ----------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        """The properties of all engines together; None until all were ready."""
        return self._info

    @property
    def status(self) -> EngineStatus:
        statuses = [replica.supervisor.status for replica in self._replicas]
        return joined_status(statuses, started=self._info is not None)

    @property
    def failure(self) -> ConfigError | None:
        """The operator's mistake that made a start fail, with its fix; None if there is none."""
        return next((found for each in self._replicas if (found := each.supervisor.failure) is not None), None)

    @property
    def restarts(self) -> int:
        return sum(replica.supervisor.restarts for replica in self._replicas)

    @property
    def alive(self) -> bool:
        """Whether an engine is ready and its heartbeat is recent."""
        return any(replica.supervisor.alive for replica in self._replicas)

    @property
    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self._replicas]

    def stats(self) -> EngineStats:
        """Return the latest statistics of all engines together."""
        return joined_stats([replica.stats for replica in self._replicas])

    # -- requests ------------------------------------------------------------------------------------------

    def place(self, sequences: Sequence[LiveSequence], message: Add) -> None:
        """Choose a replica for the live sequences of one new request."""
        self._assign(sequences, self._choice.of_request(sequences[0].request, message.prompt))

    def send(self, sequences: Sequence[LiveSequence], message: Add) -> None:
        """Send the sequences of one request to their replica, or hold them until it is ready."""
        self._replicas[sequences[0].replica].sender.send(sequences, message)

    def check_named(self, replica: int | None, count: int) -> None:
        """Raise InvalidValueError unless a server of `count` engines has this one, EngineDeadError if it is dead."""
        if replica is None:
            return
        if not 0 <= replica < count:
            message = f"data_parallel_rank or routed_dp_rank is {replica}, and there are engines 0 to {count - 1}"
            raise InvalidValueError(message, param="data_parallel_rank")
        if len(self._replicas) > 1 and (self._replicas[replica].is_dead or self._replicas[replica].is_stale):
            raise EngineDeadError(f"engine {replica} gets no requests")

    def resend(self, sequence: LiveSequence) -> None:
        """Send a sequence again, under another id, to the replica that had it."""
        self._replicas[sequence.replica].sender.send([sequence])

    def _assign(self, sequences: Iterable[LiveSequence], replica: Replica) -> None:
        for sequence in sequences:
            self._live.assign(sequence, replica.index)
            sequence.prefill_only = self._choice.passes_on(replica, sequence.request)

    # -- prompts that go on in another replica -------------------------------------------------------------

    def take_prompt(self, sequence: LiveSequence, output: TokenOutput) -> bool:
        """Receive the last output of a replica that only computed a sequence's prompt.

        Returns False if the sequence ends with it because it was aborted or failed.
        """
        if self._handover is None or output.finish_reason not in SERVED:
            return False
        if sequence.aborted:
            self._events.answer_abort(sequence)
        else:
            self._handover.receive(sequence, output, self._replicas[sequence.replica])
        return True

    def _go_on(self, sequences: Sequence[LiveSequence], replica: Replica) -> None:
        for sequence in sequences:
            self._live.assign(sequence, replica.index)
        replica.sender.send(sequences)

    def abort(self, sequences: Iterable[LiveSequence]) -> None:
        """Tell the engines to end the sequences, and go on with a search that waited for them."""
        ids: dict[int, list[str]] = {}
        for sequence in sequences:
            if sequence.replica != NOWHERE:
                ids.setdefault(sequence.replica, []).append(sequence.engine_id)
        for index, found in ids.items():
            self._replicas[index].link.send(Abort(found))

    def advance(self) -> None:
        """Go on with searches for culprits, and with computed prompts, after sequences have ended or given outputs."""
        if self._handover is not None:
            self._handover.advance()
        for replica in self._replicas:
            if replica.sender.is_watching:
                was_isolating = replica.sender.is_isolating
                replica.sender.advance()
                if was_isolating and replica.is_usable:
                    self._give_held(replica)

    def pages_changed(self, replica: Replica, events: PageEvents) -> None:
        """Record the changes of a replica's prefix cache."""
        if self._choice.router is not None:
            self._choice.router.update(replica.index, events)

    def stats_changed(self, replica: Replica, stats: EngineStats) -> None:
        """Record the statistics of a replica, and its measurements since it was ready.

        Until the calls of the record are answered, the adapters that it will have again keep their names.
        """
        if not replica.sender.is_up or replica.calls.num_made:
            adapters = {each.name: each for each in (*stats.adapters, *replica.stats.adapters)}
            stats = msgspec.structs.replace(stats, adapters=[*adapters.values()])
        replica.stats = stats
        if replica.info is not None and (info := with_measured(replica.info, stats)) is not replica.info:
            replica.info = info
            self._join()

    # -- starts and deaths ---------------------------------------------------------------------------------

    def _became_ready(self, replica: Replica, info: EngineInfo) -> None:
        replica.info = info
        if len(self._replicas) > 1 and self._choice.router is None:
            self._choice.router = Router(info.page_size)
        self._join()
        replica.calls.ready()
        self._restore(replica)
        replica.sender.ready()
        if replica.is_usable:
            self._give_held(replica)

    def _join(self) -> None:
        infos = [each.info for each in self._replicas if each.info is not None]
        if len(infos) == len(self._replicas):
            self._info = joined_info(infos)

    def _restore(self, replica: Replica) -> None:
        """Bring a new engine into the state that calls have made, before it gets requests."""
        if self._record.has_lost and any(each.is_usable for each in self._replicas):
            self._make_stale(replica, "its weights went with the engine before it")
            return
        replica.is_stale = False
        replica.asleep = self._record.asleep
        on_failure = functools.partial(self._restore_failed, replica) if len(self._replicas) > 1 else None
        for call in self._record.calls():
            replica.calls.make(call, on_failure if call.changes_weights else None)

    def _restore_failed(self, replica: Replica, error: BaseException) -> None:
        if not isinstance(error, EngineDeadError):
            self._make_stale(replica, str(error))

    def _make_stale(self, replica: Replica, reason: str) -> None:
        """Give a replica without the weights of the others no requests until the next update."""
        replica.is_stale = True
        logger.error("engine %d gets no requests until its weights are updated: %s", replica.index, reason)
        self.abort(sequence for sequence in replica.live if sequence.is_sent)
        for sequence in replica.live:
            self._events.end_with_error(
                sequence, ServerError("the engine was restarted without the weights of this request")
            )

    def _give_held(self, replica: Replica) -> None:
        """Give a usable replica the sequences that others hold until they are started again."""
        for other in self._replicas:
            if other is not replica and not other.sender.is_up:
                self._assign([each for each in other.sender.not_suspects() if not each.is_sent], replica)
        replica.sender.send_held()

    def _died(self, replica: Replica, error: EngineDeadError) -> Death:
        replica.calls.fail(error)
        others = [each for each in self._replicas if each is not replica and not (each.is_dead or each.is_stale)]
        death = replica.sender.died(replica.link.in_work(), elsewhere=bool(others))
        for sequence in replica.live:
            if sequence.aborted:
                self._events.answer_abort(sequence)
        if len(self._replicas) > 1:
            replica.stats = EngineStats()
            if self._choice.router is not None:
                self._choice.router.forget(replica.index)
            self._promote_stale()
            self._move(replica.sender.not_suspects())
        return death

    def _promote_stale(self) -> None:
        """If all engines with the weights of an update have died, go on with the weights of the start."""
        stale = [each for each in self._replicas if each.is_stale and each.sender.is_up]
        if stale and not any(each.is_usable for each in self._replicas):
            for each in stale:
                self._restore(each)

    def _move(self, sequences: Sequence[LiveSequence]) -> None:
        """Send sequences to other replicas. If none is up, they wait for the first one that is."""
        requests: dict[str, list[LiveSequence]] = {}
        for sequence in sequences:
            requests.setdefault(sequence.unit, []).append(sequence)
        targets: dict[int, Replica] = {}
        for own in requests.values():
            request = own[0].request
            target = self._choice.of_request(request, prompt_bytes(request), at_first=False)
            self._assign(own, target)
            targets[target.index] = target
        for target in targets.values():
            target.sender.send_held()
        if targets:
            logger.warning("%d requests go on in engines %s", len(requests), ", ".join(map(str, sorted(targets))))

    def _leave_sleeping(self) -> None:
        """Move requests from sleeping engines if others are awake, because only some carried out a call."""
        awake = usable(self._replicas)
        for replica in self._replicas:
            if awake and replica.asleep and replica not in awake:
                leaving = [each for each in replica.sender.not_suspects() if not each.aborted]
                self.abort(each for each in leaving if each.is_sent)
                for sequence in leaving:
                    sequence.is_sent = False
                    self._live.renew_id(sequence)
                self._move(leaving)

    def _ended(self, replica: Replica, error: EngineDeadError) -> None:
        """End the suspects of a replica that will not be started again. With the last replica the server ends."""
        replica.calls.fail(error)
        if all(each.is_dead for each in self._replicas) or self._info is None:
            self._events.fail_all(error)
            return
        self._move(replica.sender.not_suspects())
        for sequence in replica.live:
            self._events.end_with_error(sequence, ServerError("the engine died each time it computed this request"))

    # -- calls ---------------------------------------------------------------------------------------------

    async def finish(self) -> bool:
        """Pause when the requests that have arrived so far have ended. Returns False if that was given up."""
        return await self._finishing.finish(functools.partial(self.call, Pause("retract")))

    async def call(self, call: EngineCall) -> Any:
        """Make a call to every engine. Raises an HTTPError if not all of them have carried it out.

        An engine that dies meanwhile gets the call from the record if it is started after the others have answered. If
        it was started before, the call is made again.
        """
        if not isinstance(call, Update):
            return await self._call(call)
        async with self._updating:
            return await self._call(self._record.begun_update(call))

    async def _call(self, call: EngineCall) -> Any:
        outcome = await call_all(self._replicas, call)
        if outcome.done:
            self._record.record(call, next(iter(outcome.done.values())))
        while missed := outcome.missed:
            outcome = outcome.joined(await call_all(missed, call))
        if call.changes_weights and len(self._replicas) > 1:
            is_partial = isinstance(call, UpdateFromFile) and call.partial
            for replica in outcome.done:
                replica.is_stale = replica.is_stale and is_partial
            for replica in outcome.refused if outcome.done else ():
                self._make_stale(replica, "the update of its weights failed")
        for replica, result in outcome.done.items():
            replica.asleep = call.asleep_after(replica.asleep, result)
        self._leave_sleeping()
        return outcome.result()

    def fail_calls(self, error: HTTPError) -> None:
        """End all calls with an error."""
        for replica in self._replicas:
            replica.calls.fail(error)
