"""Which requests run in the next step, on which pages. Pure Python over plain data: no jax, no text, no clock.

Owns every Request from `add` to its last TokenOutput, the queue, the token budget and the meaning of a step's
tokens. What a request holds of the device is the KVManager's.

    add -> WAITING --> RUNNING (slot, pages) --> FINISHED
              ^           |                         every way there goes through `_finish`
              +-PREEMPTED-+  output kept

`schedule` may run once more before `update` of the step before: rows in flight are taken to have produced a token.
The end of a request is then seen one step late, and the token of that extra step is dropped.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import Collection, Sequence

from jaxserve.engine.admission import NewTokenRatio, PrefillsInProgress, Room
from jaxserve.engine.background import Courtesy
from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.logprobs import (
    add_details,
    gather_prompt_details,
    gather_prompt_logprobs,
    output_logprobs,
    take_prompt_details,
    too_many_candidates,
)
from jaxserve.engine.radix_cache import Node
from jaxserve.engine.request import (
    FinishReason,
    Request,
    RequestStatus,
    SampledTokens,
    ScheduledRow,
    SchedulerOutput,
    TokenLogprobs,
    TokenOutput,
)
from jaxserve.engine.running_set import RunningSet
from jaxserve.engine.scheduler_config import SchedulerConfig
from jaxserve.engine.scheduler_stats import Counters, SchedulerStats
from jaxserve.engine.step_builder import StepBuilder, pages_wanted
from jaxserve.engine.stopping import Timers, end_of
from jaxserve.engine.waiting_queue import WaitingQueue
from jaxserve.engine.window_group import WindowGroup
from jaxserve.errors import InvalidValueError, QueueFullError

MAX_SKIPPED = 64  # waiting requests looked at in one step without admitting them

logger = logging.getLogger(__name__)


class Scheduler:
    """eos_token_ids: the model's own; a request that does not ignore them ends on them."""

    def __init__(self, config: SchedulerConfig, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.config = config
        self.counters = Counters()
        self.kv = KVManager(config)
        self._eos_token_ids = eos_token_ids
        self._waiting = WaitingQueue(config.policy, config.aging_steps, lambda request: self.kv.match(request).depth)
        self._running = RunningSet()
        self._live: dict[str, Request] = {}
        self._timers = Timers()
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._step = 0  # the last one scheduled
        self._last_read = 0  # the last one whose tokens are here
        self._ratio = NewTokenRatio(config.new_token_ratio)
        self._room = Room(self._ratio, self.kv)
        self._prefills = PrefillsInProgress(config.page_size, config.prefix_cache)
        self._courtesy = Courtesy(config)

    # --- requests come and go

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight)

    @property
    def live_ids(self) -> Collection[str]:
        return self._live.keys()

    def check_queue(self, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raise QueueFullError if so many more requests with so many prompt tokens may not wait."""
        config, waiting = self.config, self._waiting
        if len(waiting) + num_requests > config.max_queued_requests:
            raise QueueFullError(f"the queue is full: {len(waiting)} requests wait")
        limit = config.max_queued_tokens
        if limit is not None and len(waiting) and waiting.num_tokens + num_tokens > limit:
            raise QueueFullError(f"the queue is full: {waiting.num_tokens} prompt tokens wait")

    def add(self, request: Request) -> None:
        """Queue a request. Raises as `SchedulerConfig.check_fits`; the queue's limits are for the caller to ask."""
        params = request.params
        self.config.check_fits(request.num_prompt_tokens, request.max_tokens)
        if request.request_id in self._live:
            raise InvalidValueError(f"request id {request.request_id} is in use", param="request_id")
        eos = () if params.ignore_eos else self._eos_token_ids
        request.stop_token_ids = frozenset((*eos, *params.stop_token_ids))
        request.max_computed_tokens = request.num_prompt_tokens + request.max_tokens - 1
        if params.prompt_logprobs is not None:
            unknown: list[TokenLogprobs | None] = [None]
            request.prompt_logprobs = unknown * request.num_prompt_tokens
        request.detail = params if params.detailed else None
        request.prompt_hidden = {} if params.hidden_states == "all" else None
        request.prompt_experts = {} if params.experts else None
        request.queued_step = self._step
        request.priority = self.config.rank(request.priority)
        self._live[request.request_id] = request
        self._courtesy.count(request, 1)
        self._waiting.push(request)
        if request.deadline is not None:
            self._timers.set(request.deadline, request.request_id)
        if self.config.queue_timeout is not None:
            self._timers.set(request.arrival + self.config.queue_timeout, request.request_id)

    def end_resumed(self, request_id: str) -> TokenOutput | None:
        """The last output of a request whose output from before a restart was complete already, else None."""
        request = self._live[request_id]
        _, reason, stop_token_id = end_of(request, len(request.output_token_ids))
        return self._finish(request, reason, stop_token_id=stop_token_id) if reason else None

    def expire(self, now: float) -> list[TokenOutput]:
        """End the requests whose deadline or time in the queue is over; their last outputs."""
        outputs: list[TokenOutput] = []
        for request_id in self._timers.due(now):
            request = self._live.get(request_id)
            if request is not None and (message := self._overdue(request, now)):
                outputs.append(self._finish(request, FinishReason.ERROR, error=message, error_status=504))
        return outputs

    def _overdue(self, request: Request, now: float) -> str | None:
        limit = self.config.queue_timeout
        if request.deadline is not None and now >= request.deadline:
            return f"the deadline of {request.deadline - request.arrival:g} s has passed"
        if limit is not None and request.admitted is None and now >= request.arrival + limit:
            return f"waited {limit:g} s in the queue"
        return None

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenOutput | None:
        """End a request, wherever it is; its last output, or None if it has ended already."""
        request = self._live.get(request_id)
        return self._finish(request, reason) if request else None

    def fail(self, request_id: str, error: str, status: int = 500) -> TokenOutput | None:
        """End a request whose output cannot go on; its last output, or None if it has ended already."""
        request = self._live.get(request_id)
        return self._finish(request, FinishReason.ERROR, error=error, error_status=status) if request else None

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_status: int = 500,
    ) -> TokenOutput:
        if request.status is RequestStatus.RUNNING:
            self._leave_device(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._live[request.request_id]
        self._courtesy.count(request, -1)
        self.counters.count_end(reason)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=token_ids or [],
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
            error_status=error_status,
        )

    def _leave_device(self, request: Request) -> None:
        self._running.has_ended = True
        self._prefills.remove(request)
        self.kv.release(request, self._last_read)

    def recover(self) -> list[str]:
        """The device lost its state: forget the steps in flight and all pages; whatever ran is computed again.

        The ids of the requests in those steps that have not ended.
        """
        in_flight = [request.request_id for _, requests in self._in_flight for request in requests]
        ids = [request_id for request_id in dict.fromkeys(in_flight) if request_id in self._live]
        self._in_flight.clear()
        self._last_read = self._step
        self.kv.cache.flush()
        self.kv.retire(self._step)
        for request in reversed(self._running.best_first(by_priority=True)):
            self._preempt(request)
        for request in self._live.values():
            request.num_inflight_tokens = 0
        return ids

    def expects_online(self, now: float) -> bool:
        """Whether lines run that online requests should not have to wait for. now: seconds"""
        return self._courtesy.expects_online(now)

    # --- the next step

    def schedule(self, now: float, only: Collection[str] | None = None) -> SchedulerOutput | None:
        """The next step, or None if nothing can run before a step in flight has been read.

        now: seconds. only: ids of the waiting requests that may start; None: all.
        """
        self._running.drop_ended()
        self._make_room()
        step = StepBuilder(self._step + 1, self.config.tokens_per_step, self.kv.window)
        prefilling, best_waiting = self._running.prefilling, self._waiting.best_priority
        sit_out = self._courtesy.sit_out(len(self._live), best_waiting, prefilling, now)
        # Nobody gives way to requests that may not start, or that find no room and none about to come free.
        if only is not None or not sit_out or not (self._fill(step, now, False, only) or self.kv.has_leaving):
            self._fill(step, now, True, only)
        step.fit(self.config.step_sizes)
        self._running.promote()
        return self._dispatch(step) if step.rows else None

    def _fill(self, step: StepBuilder, now: float, lines: bool, only: Collection[str] | None) -> bool:
        """Add the rows of a step; whether there are any. lines: theirs too. only: as of `schedule`."""
        courtesy, decoding, prefilling = self._courtesy, self._running.decoding, self._running.prefilling
        apart = lines and courtesy.keeps_apart(now)
        if apart or not lines:
            decoding = courtesy.without_lines(decoding)
        if not lines:
            prefilling = courtesy.without_lines(prefilling)
        short_of_pages = step.add_decodes(decoding, self.kv)
        room = self.config.max_num_batched_tokens - step.num_decode_rows
        step.budget = min(room, courtesy.budget(step.num_decode_rows, lines, now))
        for request in courtesy.in_order(prefilling):
            step.add_chunk(request)
        if len(self._waiting) and not short_of_pages:
            self._admit(step, now, lines, only)
        if apart and len(step.rows) == step.num_decode_rows:
            step.add_decodes(courtesy.only_lines(self._running.decoding), self.kv)
        return bool(step.rows)

    def _dispatch(self, step: StepBuilder) -> SchedulerOutput:
        output = step.build()
        self._step = step.number
        self._in_flight.append((output, step.requests))
        self.counters.steps += 1
        self.counters.prefill_tokens += output.num_tokens - output.num_decode_rows
        if output.num_decode_rows:
            self._ratio.decay()
        return output

    def _admit(self, step: StepBuilder, now: float, lines: bool, only: Collection[str] | None) -> None:
        """Start waiting requests, in the order of the policy, until the first that finds no room.

        lines: them too. only: as of `schedule`.
        """
        if not self._running:
            self._ratio.reset()
        reserved = self._room.reserve(self._running)
        admitted: list[Request] = []
        skipped = 0
        for request in self._waiting.candidates(step.number):
            if only is not None and request.request_id not in only:
                continue
            if step.budget <= 0 or skipped >= MAX_SKIPPED or request.slot is not None:
                break  # with a slot: preempted so lately that a step with it is still in flight
            if not (lines or request.aged) and self._courtesy.is_line(request):
                break  # none but lines come after it
            if self.config.whole_prompts and request.num_tokens > step.budget:
                break
            node = self.kv.match(request)
            if not request.aged and self._prefills.worth_waiting(request, node):
                skipped += 1
                continue
            missing = self._room.missing(request, node, reserved, alone=not self._running)
            if max(missing) > 0 or not self.kv.num_free_slots:
                self._preempt_for(request, missing)
                break
            self._start(step, request, node, -missing[-1] // self.config.page_size, now)
            admitted.append(request)
            reserved = [a + b for a, b in zip(reserved, self._room.reserve((request,)), strict=True)]
        for request in admitted:
            self._waiting.remove(request)

    def _start(self, step: StepBuilder, request: Request, node: Node, surplus: int, now: float) -> None:
        self.kv.take(request, node, surplus)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = node.depth * self.config.page_size
        request.num_prefill_tokens = request.num_tokens
        request.prompt_done = False
        if request.admitted is None:
            request.admitted = now
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self.counters.count_admission(request)
        self._courtesy.started(request, request.num_prefill_tokens - request.num_computed_tokens)
        self._prefills.add(request, node)
        self._running.prefilling.append(request)
        step.add_first_chunk(request, self._eos_token_ids)

    # --- taking back

    def _make_room(self) -> None:
        """Retract requests if the decoding ones need more pages than there are and none are about to come free."""
        decoding, available = self._running.decoding, self.kv.num_available
        if available >= len(decoding) * self.kv.num_pages_for(2 * self.config.tokens_per_step - 1):
            return
        wanted = sum(self._pages_wanted(request) for request in decoding)
        if wanted > available:
            self.kv.merge_duplicates(self._running)
            available = self.kv.num_available
        ending = any(request.num_computed_tokens >= request.max_computed_tokens for request in decoding)
        if wanted > available and not (ending or self.kv.has_leaving):
            self._retract([wanted - left for left in self.kv.available()])

    def _retract(self, missing: list[int]) -> None:
        """Preempt the requests that are least far until the pages that each group lacks come free; the furthest one
        stays."""
        kept = self._running.best_first(by_priority=True)
        count, wanted = len(kept), max(missing)
        while max(missing) > 0 and len(kept) > 1:
            victim = kept.pop()
            spared = self._pages_wanted(victim)
            missing = [m - own - spared for m, own in zip(missing, self.kv.num_reclaimable(victim), strict=True)]
            self._preempt(victim)
        self._ratio.rise(kept)
        self.counters.retractions += count - len(kept)
        self.counters.retraction_events += 1
        logger.info(
            "%d pages short: retracted %d of %d requests, %d wait, new-token ratio now %.3f",
            wanted, count - len(kept), count, len(self._waiting), self._ratio.value,
        )  # fmt: skip

    def _preempt_for(self, request: Request, missing: list[int]) -> None:
        """Preempt requests of worse priority if that makes room for a better one."""
        if request.aged or self.kv.has_leaving or all(other.priority <= request.priority for other in self._running):
            return
        victims: list[Request] = []
        for victim in reversed(self._running.best_first(by_priority=True)):
            if self._is_enough(missing, victims) or victim.aged or victim.priority <= request.priority:
                break
            victims.append(victim)
            freed = zip(missing, self.kv.num_reclaimable(victim), self._room.reserve((victim,)), strict=True)
            missing = [m - pages * self.config.page_size - growth for m, pages, growth in freed]
        if self._is_enough(missing, victims):
            for victim in victims:
                self._preempt(victim)
            self.counters.priority_preemptions += len(victims)

    def _is_enough(self, missing: list[int], victims: list[Request]) -> bool:
        return max(missing) <= 0 and bool(victims or self.kv.num_free_slots)

    def _pages_wanted(self, request: Request) -> int:
        return pages_wanted(request, self.kv, self.config.tokens_per_step)

    def _preempt(self, request: Request) -> None:
        self._leave_device(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._waiting.push_front(request)
        self._running.drop_ended()

    # --- what came back

    def update(self, output: SchedulerOutput, sampled: SampledTokens, now: float) -> list[TokenOutput]:
        """Take in the tokens of the oldest step in flight. Raises ValueError for any other step."""
        if not self._in_flight or self._in_flight[0][0] is not output:
            raise ValueError(f"step {output.step} is not the oldest one in flight")
        _, requests = self._in_flight.popleft()
        self._last_read = output.step
        per_step, outputs = self.config.tokens_per_step, []
        token_ids, num_valid, ok = sampled.token_ids.tolist(), sampled.num_valid.tolist(), sampled.ok.tolist()
        for i, (row, request) in enumerate(zip(output.rows, requests, strict=True)):
            if row.prompt_logprobs is not None:
                gather_prompt_logprobs(request, row, i, sampled)
            if row.detail is not None:
                gather_prompt_details(request, row, i, sampled)
            if not row.samples:
                continue
            request.num_inflight_tokens -= per_step
            if request.status is RequestStatus.FINISHED:
                self.counters.dropped_tokens += num_valid[i]
            elif not ok[i]:
                outputs.append(self._fail_row(request))
            elif row.embed:
                outputs.append(self._end_with_embedding(request, i, sampled, now))
            elif row.detail is not None and (error := too_many_candidates(row, i, sampled)):
                outputs.append(self._finish(request, FinishReason.ERROR, error=error, error_status=400))
            else:
                new = token_ids[i]
                if num_valid[i] != per_step:
                    request.num_computed_tokens -= per_step - num_valid[i]
                    new = new[: num_valid[i]]
                result = self._accept(request, new, now)
                if row.logprobs is not None:
                    result.logprobs = output_logprobs(sampled, i, result.token_ids, row.logprobs)
                    add_details(result, row, i, sampled)
                outputs.append(result)
        if self.kv.window is not None:
            self._advance_windows(self.kv.window, output.rows, requests)
        self.kv.retire(output.step)
        return outputs

    def _advance_windows(self, window: WindowGroup, rows: Sequence[ScheduledRow], requests: list[Request]) -> None:
        """The steps up to these rows' have been read: what no later one of a request sees can go."""
        running = RequestStatus.RUNNING
        for row, request in zip(rows, requests, strict=True):
            if request.status is running:
                sampled = request.num_computed_tokens - request.num_inflight_tokens
                read = sampled if row.samples else row.start + row.num_tokens
                if read >= request.window.due:
                    window.advance(request, read)

    def _accept(self, request: Request, new: list[int], now: float) -> TokenOutput:
        """Append a row's tokens and see whether they end the request."""
        output = request.output_token_ids
        output += new
        first = not request.prompt_done
        if first:
            self._complete_prompt(request)
        if len(output) < request.max_tokens and request.stop_token_ids.isdisjoint(new):
            result = TokenOutput(request_id=request.request_id, token_ids=new)
        else:
            result = self._end_or_go_on(request, new)
        self.counters.generation_tokens += len(result.token_ids)
        if first:
            self._report_first(request, result, now)
        return result

    def _complete_prompt(self, request: Request) -> None:
        """The first good result since admission is here: the pages before it may be shared."""
        request.prompt_done = True
        self._prefills.remove(request)
        self.kv.commit(request, request.num_prefill_tokens)

    def _end_with_embedding(self, request: Request, row: int, sampled: SampledTokens, now: float) -> TokenOutput:
        assert sampled.embeddings is not None
        self._complete_prompt(request)
        output = self._finish(request, FinishReason.STOP)
        output.embedding = sampled.embeddings[row].tobytes()
        self._report_first(request, output, now)
        return output

    def _end_or_go_on(self, request: Request, new: list[int]) -> TokenOutput:
        count, reason, stop_token_id = end_of(request, len(new))
        if reason is None:
            return TokenOutput(request_id=request.request_id, token_ids=new)
        del request.output_token_ids[len(request.output_token_ids) - len(new) + count :]
        return self._finish(request, reason, new[:count], stop_token_id)

    def _report_first(self, request: Request, result: TokenOutput, now: float) -> None:
        result.num_cached_tokens = request.num_cached_tokens
        result.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        take_prompt_details(request, result)
        if request.first_token is None:
            assert request.admitted is not None
            request.first_token = now
            result.queue_seconds = request.admitted - request.arrival
            result.first_token_seconds = now - request.arrival
            self.counters.first_tokens += 1
            self.counters.first_token_seconds += result.first_token_seconds

    def _fail_row(self, request: Request) -> TokenOutput:
        self.kv.discard(request)
        return self._finish(request, FinishReason.ERROR, error="the model's output was not finite (NaN or infinity)")

    # --- numbers and proof

    def stats(self) -> SchedulerStats:
        cache, num_free, window = self.kv.cache, self.kv.pool.num_free, self.kv.window
        num_preempted = sum(request.status is RequestStatus.PREEMPTED for request in self._waiting)
        return SchedulerStats(
            num_running=len(self._live) - len(self._waiting),
            num_waiting=len(self._waiting),
            num_preempted=num_preempted,
            num_waiting_tokens=self._waiting.num_tokens,
            num_pages=self.config.num_pages,
            num_pages_free=num_free,
            num_pages_cached=cache.num_pages,
            num_pages_evictable=cache.num_evictable,
            num_pages_held=self.config.num_pages - num_free - cache.num_pages,
            num_window_pages_used=0 if window is None else self.config.num_window_pages - window.num_available,
            new_token_ratio=self._ratio.value,
            counters=copy.copy(self.counters),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page, slot and request is accounted for exactly once."""
        running = [request for request in self._running if request.status is RequestStatus.RUNNING]
        waiting = list(self._waiting)
        ids = [request.request_id for request in itertools.chain(running, waiting)]
        assert sorted(ids) == sorted(self._live), "a request is lost or in two places"
        assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting)
        assert self._waiting.num_tokens == sum(r.num_prompt_tokens for r in waiting)
        assert self._running.has_ended or len(running) == len(list(self._running))
        self.kv.check_integrity(running)
