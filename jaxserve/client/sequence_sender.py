"""Sends live sequences to the engine, and again after it crashed (replay).

Any request that was in work when the engine process died may have killed it. These requests are held back and tried
again in groups, each in isolation, until the culprit is found. A group that gave its outputs is taken back, and nothing
else runs until all groups have been tried. One bad request among n is found after 1 + log16(n) crashes. It ends with an
error; all others continue.

    held -- may run --> sent -- the engine crashed, or its group passed and other groups are tried --> held

The `ProcessFaultIsolator` finds the culprit like FaultIsolator, but a failure costs a restart, which takes 20 s and
more on a GPU:

a group of one unit fails       it is accused and not tried again until another group passes; then it is to blame
all suspects are accused        another request is tried as a witness; if there is none, all are to blame
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from jaxserve.client.sequences import LiveSequence, ReplicaShare, SequenceTable
from jaxserve.client.supervisor import Death
from jaxserve.errors import HTTPError, ServerError
from jaxserve.types.fault_isolator import DeviceFaultError, FaultIsolator
from jaxserve.types.messages import Abort, Add, ToEngine
from jaxserve.types.sampling import EngineRequest, Prefilled, SamplingParams
from jaxserve.types.step import FinishReason, TokenOutput

logger = logging.getLogger(__name__)


class ProcessFaultIsolator(FaultIsolator):
    """Identifies sequences by their keys. The choices of one request are a unit."""

    # A group costs some steps, a crash costs a restart. 256 requests, tried in 16 groups and then in 16 groups of one,
    # need 3 crashes; halves would need 9.
    parts = 16
    passes = 4  # when the process dies, two steps may be on the device and two outputs on their way
    whole_first = False

    def __init__(self) -> None:
        super().__init__()
        self._accused: dict[str, list[str]] = {}  # units that failed alone -> their requests

    def __bool__(self) -> bool:
        return super().__bool__() or bool(self._accused)

    def unit_of(self, name: str) -> str:
        return LiveSequence.unit_of(name)

    def died(self, rows: list[str], witness: Sequence[str]) -> list[str]:
        """Record that the process died with these in work. Return the units to blame if known.

        witness: a request that is not a suspect, if there is one. Raises DeviceFaultError.
        """
        unit = self.failed(rows)
        if unit is not None:
            return [unit]
        if self._groups or not self._accused:
            return []
        self._add(witness, 1)
        return [] if witness else self._verdict()

    def _divide(self, group: dict[str, int], rows: list[str]) -> str | None:
        units = {self.unit_of(name) for name in rows}
        if self.has_passed or len(units) > 1:
            return super()._divide(group, rows)
        self._accused[units.pop()] = rows
        self._add([name for name in group if name not in rows], 1)
        return None

    def gave(self, outputs: Iterable[tuple[str, bool]]) -> list[str]:
        """Record outputs, like `succeeded`. Return the units to blame if a group has passed."""
        self.succeeded(outputs)
        return self._verdict() if self.has_passed else []

    def _verdict(self) -> list[str]:
        culprit = list(self._accused)
        self._accused.clear()
        return culprit

    def keep(self, live: Collection[str]) -> None:
        """Keep only live requests. If no group is left, the accused are tried again one by one."""
        super().keep(live)
        accused = {unit: [name for name in rows if name in live] for unit, rows in self._accused.items()}
        self._accused = {unit: rows for unit, rows in accused.items() if rows}
        if not self._groups:  # all requests that could have passed have ended
            for rows in self._accused.values():
                self._add(rows, 1)
            self._accused.clear()

    def is_suspect(self, name: str) -> bool:
        return any(name in group for group in self._groups) or name in self._accused.get(self.unit_of(name), ())


# A sequence that was in work at so many deaths is a suspect at the next one, even if it gave outputs after each.
MAX_DEATHS = 2
SERVED = (FinishReason.STOP, FinishReason.LENGTH)
PROMPT_ONLY = SamplingParams(max_tokens=0, temperature=0.0, ignore_eos=True)
HOLD_SECONDS = 30.0  # a prefill engine keeps the pages of a prompt so long; they are written much earlier, or never


class SequenceSender:
    """Sends the sequences `live` of one engine. Each is either sent or held.

    send       sends a message to the engine
    end        ends a sequence with an error
    on_served  called if the engine works and only a request caused its crashes

    is_up: whether the engine is ready. is_isolating: whether a search for the culprit is going on
    is_watching: `receive` and `advance` must be called for each message of outputs; False almost always
    allowed_keys: keys of the sequences that may run, see `came_before`; None: all
    """

    def __init__(
        self,
        live: SequenceTable | ReplicaShare,
        send: Callable[[ToEngine], None],
        end: Callable[[LiveSequence, HTTPError], None],
        on_served: Callable[[], None],
    ) -> None:
        self._live = live
        self._send = send
        self._end = end
        self._on_served = on_served
        self.is_up = False
        self._leaving: set[str] = set()  # engine ids that were aborted to take them back, and have not ended there
        self._isolator = ProcessFaultIsolator()
        self.is_isolating = False
        self.allowed_keys: frozenset[str] | None = None
        self._has_blamed = False  # a request was blamed, and no group has passed since to show that the engine works
        self.is_watching = False

    def send(self, sequences: Sequence[LiveSequence], message: Add | None = None) -> None:
        """Send the sequences of one request, or hold them if no engine is up or a search for a culprit is going on.

        `ready` and `advance` send held sequences. message: the request as an Add; None: build it here
        """
        if all(map(self._may_run, sequences)):
            if sequences[0].prefill_only:
                message = Add.of(*map(_prompt_of, sequences))
            self._send(message or Add.of(*map(_resumed, sequences)))
            for sequence in sequences:
                sequence.is_sent = True

    def _may_run(self, sequence: LiveSequence) -> bool:
        if self.allowed_keys is not None and not came_before(sequence, self.allowed_keys):
            return False
        quarantined = self._isolator.quarantined
        return self.is_up and not self._leaving and (quarantined is None or sequence.key in quarantined)

    def ready(self) -> None:
        """Record that an engine is ready, and send the sequences that may run."""
        self.is_up = True
        self.send_held()

    def send_held(self) -> None:
        """Send the held sequences that may run."""
        held = (sequence for sequence in self._live if not sequence.is_sent and self._may_run(sequence))
        requests: dict[tuple[str, int], list[LiveSequence]] = {}
        for sequence in sorted(held, key=lambda each: each.accepted_at):
            requests.setdefault(sequence.message_key, []).append(sequence)
        for sequences in requests.values():
            self.send(sequences)

    def receive(self, outputs: Sequence[TokenOutput]) -> None:
        """Record outputs before they are delivered."""
        if self._has_blamed and any(output.finish_reason in SERVED for output in outputs):
            self._has_blamed, self.is_watching = False, self.is_isolating
            self._on_served()
        if self.is_isolating:
            for output in outputs:
                self._take(output)

    def _take(self, output: TokenOutput) -> None:
        ended = output.finish_reason is not None
        if ended:
            self._leaving.discard(output.request_id)
        sequence = self._live.get(output.request_id)
        if sequence is None:
            return
        to_blame = self._isolator.gave([(sequence.key, ended)] * max(1, len(output.token_ids)))
        if to_blame:
            self._on_served()
        for unit in to_blame:
            self._blame(unit)

    def advance(self) -> None:
        """Continue the search after sequences gave outputs or ended: hold and send accordingly."""
        if not self.is_isolating:
            return
        self._forget_ended()
        if not (self._isolator or self._leaving):
            self.is_isolating, self.is_watching = False, self._has_blamed
            logger.info("all requests that were in work when the engine died have been tried again")
        elif self.is_up and not self._leaving:
            sent = (each for each in self._live if each.is_sent and not each.aborted)
            self._take_back([each for each in sent if not self._may_run(each)])
        self.send_held()

    def _forget_ended(self) -> None:
        self._isolator.keep({sequence.key for sequence in self._live if not sequence.aborted})

    def _take_back(self, sequences: list[LiveSequence]) -> None:
        """Take sequences back from the engine and hold them. They are computed again under another id.

        The next group is sent after these have ended there: until then a crash could be caused by either.
        """
        self._leaving = {sequence.engine_id for sequence in sequences}
        if sequences:
            self._send(Abort(list(self._leaving)))
        for sequence in sequences:
            sequence.is_sent = False
            self._live.renew_id(sequence)

    def died(self, in_work: Iterable[str], *, elsewhere: bool = False) -> Death:
        """Record that the engine died while it worked on these engine ids. Return how the death counts.

        elsewhere: another engine can go on with them. Then only sequences that were in work at an earlier death too are
        suspects; the others are `not_suspects`.
        """
        self.is_up = False
        self._leaving.clear()
        found = [sequence for engine_id in in_work if (sequence := self._live.get(engine_id)) is not None]
        working = [sequence for sequence in found if sequence.is_sent]
        keys = [each.key for each in working if not elsewhere or each.suspected or each.num_deaths >= MAX_DEATHS]
        units = {each.unit for each in working}
        for sequence in self._live:
            if sequence.unit in units:  # a sibling that waits would do the same
                sequence.num_deaths += 1
                sequence.suspected = ProcessFaultIsolator.passes
            sequence.was_admitted |= sequence.is_sent and not sequence.waiting
            sequence.is_sent = False
        self._forget_ended()
        return self._judge(keys) if keys else "counted"

    def not_suspects(self) -> list[LiveSequence]:
        """Return the sequences of requests without a suspect, which need not stay here until the search is over."""
        kept = {each.unit for each in self._live if self._isolator.is_suspect(each.key)}
        return [each for each in self._live if each.unit not in kept]

    def _judge(self, keys: list[str]) -> Death:
        quarantined = self._isolator.quarantined
        is_clear = quarantined is not None and set(keys) <= set(quarantined)  # only suspects were in work
        self.is_isolating = self.is_watching = True
        try:
            culprit = self._isolator.died(keys, self._witness())
        except DeviceFaultError:
            self._isolator = ProcessFaultIsolator()
            culprit = []
        for unit in culprit:
            self._blame(unit)
        if culprit:
            self._has_blamed = not self._isolator.has_passed
            return "solved" if self._isolator.has_passed else "counted"
        if quarantined is None:
            logger.error("%d sequences were in work when the engine died; they are tried again in groups", len(keys))
        return "search" if is_clear and self._isolator.has_passed else "counted"

    def _witness(self) -> list[str]:
        """Return the oldest request that is not a suspect."""
        others = [each for each in self._live if not (each.aborted or self._isolator.is_suspect(each.key))]
        oldest = min(others, key=lambda each: each.accepted_at, default=None)
        return [] if oldest is None else [each.key for each in others if each.unit == oldest.unit]

    def _blame(self, unit: str) -> None:
        """End the request that kills the engine."""
        culprit = [sequence for sequence in self._live if sequence.unit == unit]
        for sequence in culprit:
            self._end(sequence, ServerError("the engine died each time it computed this request"))
        if culprit:
            client_id = culprit[0].request.client_id
            logger.error("request %s ends: the engine dies whenever it computes it, and not with others", client_id)


def came_before(sequence: LiveSequence, keys: frozenset[str]) -> bool:
    """Return whether a sequence has one of these keys, or goes on with a request that an engine had before."""
    return sequence.key in keys or sequence.is_answered or sequence.request.partly_answered


def _resumed(sequence: LiveSequence) -> EngineRequest:
    """Return the request for a new engine: its prompt, its seed and the tokens it already has."""
    deadline = sequence.request.deadline
    if deadline is not None:
        deadline = max(0.0, deadline - (time.monotonic() - sequence.accepted_at))
    return msgspec.structs.replace(
        sequence.request,
        resumed_token_ids=list(sequence.text.output_token_ids),
        is_answered=sequence.is_answered,
        deadline=deadline,
        prefilled=_with_seconds(sequence),
    )


def _with_seconds(sequence: LiveSequence) -> Prefilled | None:
    before = sequence.prefilled
    return before and msgspec.structs.replace(before, seconds=max(0.0, time.monotonic() - sequence.accepted_at))


def _prompt_of(sequence: LiveSequence) -> EngineRequest:
    """Return the request for a prefill engine: it ends without a token, and its pages wait there to be fetched."""
    return msgspec.structs.replace(
        _resumed(sequence), params=PROMPT_ONLY, resumed_token_ids=[], hold_seconds=HOLD_SECONDS, prefilled=None
    )
