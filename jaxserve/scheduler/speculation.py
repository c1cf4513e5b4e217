"""Speculation of running requests: which rows of a step get drafts, and how many of the drafts were right.

A step with drafts is made from tokens that the host has read, so the step before it is read first. As long as no draft
is worth a place in a step, nothing changes: the drafts of a request are only compared with its tokens.

A draft model proposes its drafts on the device after a step that asks for them. A step asks if drafts are worth it by
the rates so far. For TRIAL tokens after they were worth it for a row, steps ask now and then too, because rates only
change by drafts that were compared. When no row is on trial any more, or there are so many rows that even right drafts
would not be worth it, the draft model rests: steps leave its layers out, and cost what they cost without it.

A row that had steps without it goes on with its rate. Its pages then have K and V of other tokens where the draft model
rested. So its guesses are worse. They count like any others as soon as steps ask again, because another row came or one
row less is there. A request that starts anew is on trial.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from jaxserve.scheduler.step_builder import StepBuilder
from jaxserve.scheduler.stopping import end_of
from jaxserve.speculation.device import MODEL_RATE, DeviceDrafts
from jaxserve.speculation.ngram import Drafter, DraftMasks, DraftRecord, allot
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import DraftCounters, Request, SchedulerOutput

# A draft model that is never right rests after 64 tokens at the latest, by TRIAL and PATIENCE.
PROBE = 16  # steps without drafts after which the device proposes some to be compared
TRIAL = 48  # tokens for which a row's drafts are awaited after they were worth it, or since it began
PATIENCE = 12  # steps without hope, which many rows at once may cause, after which the draft model rests


class Speculation:
    """The drafts of all running requests. masks: the token masks of the requests that have one"""

    def __init__(self, drafter: Drafter, masks: DraftMasks, config: SchedulerConfig) -> None:
        self._drafter = drafter
        self._masks = masks
        self._config = config
        self._device = drafter if isinstance(drafter, DeviceDrafts) else None
        self._num_unasked = 0  # steps since the last that asked the device for drafts
        self._num_hopeless = 0  # decode steps since the last in which a row's drafts could be worth it
        self.counters = DraftCounters()

    def must_read_first(self, in_flight: SchedulerOutput, decoding: Iterable[Request], *, prompts: bool) -> bool:
        """Return whether the step in flight must be read first: it has drafts, or the next step should have drafts.

        prompts: the next step will probably have a prompt, and so no drafts
        """
        if in_flight.num_drafts or prompts:
            return in_flight.num_drafts > 0
        requests = [request for request in decoding if request.num_computed_tokens < request.max_computed_tokens]
        if in_flight.draft_room and self._worth_asking(requests):
            return True
        offers = [(record.rate, len(record.drafts)) for _, record in self._with_drafts(requests)]
        return bool(offers) and self._allot(len(requests), offers) is not None

    def ask(self, step: StepBuilder, *, prompts: bool) -> None:
        """Decide what the draft model of the device does: whether it proposes drafts after a step, or rests in it.

        prompts: the next step will probably have a prompt, and so no drafts
        """
        if self._device is None or not step.rows:
            return
        requests = [request for request in step.requests if request.num_computed_tokens < request.max_computed_tokens]
        # the next step gets none after details of a token either
        possible = not prompts and len(step.rows) <= self._config.draft_rows
        possible = possible and all(row.extras is None for row in step.rows)
        if possible and (worth := self._worth_asking(requests)):
            step.ask_drafts(self._config.max_drafts)
            self._num_unasked = self._num_hopeless = 0
            for request in worth:
                self._record_of(request).worth_at = len(request.output_token_ids)
            return
        hopeful = possible and bool(self._worth_asking(requests, hoping=True))
        self._num_unasked += 1
        if hopeful and self._num_unasked >= PROBE:
            step.ask_drafts(0)
            self._num_unasked = 0
        if not step.has_prompt:
            self._num_hopeless = 0 if hopeful else self._num_hopeless + 1
            if self._num_hopeless > PATIENCE:
                step.rests = True
                self.counters.num_rest_steps += 1

    def _worth_asking(self, requests: list[Request], *, hoping: bool = False) -> list[Request]:
        """Return the requests whose drafts will be worth it in a step of all of them, if the device is asked.

        hoping: suppose that all drafts of the rows on trial will be right
        """
        found = [(request, self._record_of(request)) for request in requests if request.params.speculate]
        on_trial = [len(request.output_token_ids) - record.worth_at < TRIAL for request, record in found]
        if hoping and not any(on_trial):
            return []
        rates = [1.0 if hoping and on else record.rate for (_, record), on in zip(found, on_trial, strict=True)]
        offers = [(rate, self._config.max_drafts) for rate in rates]
        before = self._config.step_times.draft_seconds(len(requests))
        counts = self._allot(len(requests), offers, before) if offers else None
        return [request for (request, _), count in zip(found, counts or (), strict=False) if count]

    def offer(self, step: StepBuilder) -> None:
        """Give rows of a step drafts if that is worth it. All tokens of its requests must have been read."""
        if any(row.extras is not None for row in step.rows):
            return  # these outputs are of one token a row
        found = self._with_drafts(step.requests)
        offers = [(record.rate, step.room_for_drafts(i, len(record.drafts))) for i, record in found]
        counts = self._allot(len(step.rows), offers) if offers else None
        for (i, record), count in zip(found, counts or (), strict=False):
            request = step.requests[i]
            drafts = record.drafts[: step.room_for_drafts(i, count)]
            if drafts and request.masked:
                drafts = self._masks.allow(request.request_id, drafts)
            if drafts:
                step.add_drafts(i, drafts)

    def _allot(self, num_rows: int, offers: list[tuple[float, int]], seconds_before: float = 0.0) -> list[int] | None:
        """Return how many drafts each offer gets, see `allot`; None: no drafts are worth a step.

        seconds_before: that making the drafts will take; 0 for forced drafts and for drafts that the device has made
        """
        return allot(num_rows, offers, self._config.verify_sizes, self._config.step_times, seconds_before)

    def _with_drafts(self, requests: Iterable[Request]) -> list[tuple[int, DraftRecord]]:
        records = ((i, self._record(request)) for i, request in enumerate(requests))
        return [(i, record) for i, record in records if record is not None and record.drafts]

    def _record(self, request: Request) -> DraftRecord | None:
        """Return the record of a request with drafts for its next tokens; None if it may have none."""
        if not request.params.speculate:
            return None
        record = self._record_of(request)
        if record.position != request.num_tokens:
            record.position = request.num_tokens
            record.drafts = self._propose(request)
        return record

    def _record_of(self, request: Request) -> DraftRecord:
        record: DraftRecord | None = request.speculation
        if record is None:
            record = request.speculation = DraftRecord() if self._device is None else DraftRecord(MODEL_RATE)
            record.worth_at = len(request.output_token_ids)
        return record

    def _propose(self, request: Request) -> list[int]:
        # The last token of an output is never a draft: a row yields one token after its drafts.
        most = min(self._config.max_drafts, request.max_tokens - len(request.output_token_ids) - 1)
        if most < 1:
            return []
        forced = self._masks.forced(request.request_id, most) if request.masked else []
        drafts = forced or self._drafter.propose(request, most)
        stops = request.stop_token_ids
        return list(itertools.takewhile(lambda token: token not in stops, drafts))

    def accept(self, request: Request, drafts: tuple[int, ...], new: list[int]) -> tuple[int, int]:
        """Compare a row's drafts with the tokens that it yielded, which are the last ones of the request's output.

        Returns how many of `drafts` belong to the output, and how many do not.
        """
        record: DraftRecord | None = request.speculation
        if record is not None:
            record.compare(request.num_tokens - len(new), new)
        if not drafts:
            return 0, 0
        num_used, *_ = end_of(request, len(new))
        num_accepted = min(num_used, len(new) - 1)
        self.counters.count(len(drafts), num_accepted)
        return num_accepted, len(drafts) - num_accepted

    def take(self, request: Request, drafts: list[int]) -> None:
        """Keep the device's drafts for a running request, whose tokens of the same step are known."""
        assert self._device is not None
        self._device.take(request, drafts)

    def forget(self, request: Request) -> None:
        """Drop the drafts of a request that has ended."""
        self._drafter.forget(request.request_id)
        request.speculation = None
