"""Decides which requests run in the next step and on which pages. Pure Python over plain data: no jax, text or clock.

The `Scheduler` owns every Request from `add` to its last TokenOutput, the queue, the token budget and the meaning of a
step's tokens. The KVManager owns slots and pages.

    add -> WAITING --> RUNNING (slot, pages) --> FINISHED
              ^           |                         every transition goes through `_finish`
              +-PREEMPTED-+  output kept

`schedule` may be called before `update` of the previous step, if that has no drafts. It assumes that each row in
flight yields a token. If such a row ends its request, the token of the additional step is dropped.

`StepsInFlight` holds the steps that were dispatched and not read. `PromptProgress` shares and frees pages of the
requests of a step that was read.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from jaxserve.errors import InvalidValueError
from jaxserve.kv.kv_manager import KVManager
from jaxserve.scheduler.adapter_slots import AdapterSlots
from jaxserve.scheduler.admission import Admitter, NewTokenRatio, Preemption, PrefillsInProgress, PromptShares, Room
from jaxserve.scheduler.background import make_policy
from jaxserve.scheduler.pictures import PicturePool
from jaxserve.scheduler.running_set import RunningSet
from jaxserve.scheduler.scheduler_stats import Counters, SchedulerStats
from jaxserve.scheduler.speculation import Speculation
from jaxserve.scheduler.step_builder import (
    StepBuilder,
    StepLogprobs,
    add_extras,
    ask_prompt_outputs,
    gather_prompt_outputs,
    report_first,
    too_many_candidates,
)
from jaxserve.scheduler.stopping import Timers, end_of, nothing_allowed, overdue, resolve
from jaxserve.scheduler.tenants import TenantShares
from jaxserve.scheduler.waiting_queue import WaitingQueue, WaitReason
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import (
    FinishReason,
    Request,
    RequestStatus,
    RowStatus,
    SampledTokens,
    ScheduledRow,
    SchedulerOutput,
    TokenOutput,
)

logger = logging.getLogger(__name__)


class StepsInFlight:
    """The dispatched steps, oldest first, each with the requests of its rows."""

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, list[Request]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> SchedulerOutput:
        return self._steps[-1][0]

    def request_ids(self) -> Collection[str]:
        """Return the ids of the requests that these steps work for, without repetition."""
        return dict.fromkeys(request_id for output, _ in self._steps for request_id in output.request_ids)

    def add(self, output: SchedulerOutput, requests: list[Request]) -> None:
        self._steps.append((output, requests))

    def take(self, output: SchedulerOutput) -> list[Request]:
        """Remove the oldest step and return its requests. Raises ValueError unless it is `output`."""
        if not self._steps or self._steps[0][0] is not output:
            raise ValueError(f"step {output.step} is not the oldest one in flight")
        return self._steps.popleft()[1]

    def clear(self) -> None:
        self._steps.clear()

    # --- rows of the newest step with a late token mask

    def take_back(self, rows: Sequence[int]) -> list[Request]:
        """Count rows as not sampled, and their last tokens as not computed. Returns their requests."""
        output, requests = self._steps[-1]
        for i in rows:
            output.rows[i] = msgspec.structs.replace(output.rows[i], samples=False)
            most = 1 + len(output.rows[i].drafts)
            requests[i].num_computed_tokens -= most
            requests[i].num_inflight_tokens -= most
        return [requests[i] for i in rows]

    def pause(self, paused: Collection[str]) -> None:
        """Pause the masked requests of `paused` until `Scheduler.resume`. The other masked ones continue."""
        output, requests = self._steps[-1]
        for row, request in zip(output.rows, requests, strict=True):
            if row.masked:
                request.is_paused = row.request_id in paused
                if request.is_paused:
                    logger.debug("request %s waits: its token mask is being computed", request.request_id)


class PromptProgress:
    """Shares the pages of prompts that were read, and frees pages that no later step sees."""

    def __init__(self, kv: KVManager, prefills: PrefillsInProgress) -> None:
        self._kv = kv
        self._prefills = prefills

    def share_chunk(self, request: Request, row: ScheduledRow) -> None:
        """Allow sharing of the full pages of a prompt chunk that was read and is finite.

        The request may have ended or been preempted: it holds its pages until its last step is read.
        """
        if row.start == request.num_read_tokens:  # otherwise a chunk before this one was not finite
            request.num_read_tokens += row.num_tokens
            self._kv.commit(request, request.num_read_tokens)
            self._prefills.advance(request)

    def complete_prompt(self, request: Request) -> None:
        """Record the first finite result since admission."""
        request.prompt_done = True
        self._prefills.remove(request)

    def advance_groups(self, rows: Sequence[ScheduledRow], requests: Sequence[Request]) -> None:
        """Free pages that no later step of these rows can see, now that their steps have been read."""
        running = RequestStatus.RUNNING
        for group in self._kv.groups:
            index = group.index
            for row, request in zip(rows, requests, strict=True):
                if request.status is running:
                    computed = request.num_computed_tokens - request.num_inflight_tokens
                    read = computed if row.samples else min(computed, row.start + row.num_tokens)
                    if read >= request.holdings[index].due:
                        group.advance(request, read)


class Scheduler:
    """Makes an engine's steps.

    eos_token_ids: tokens that end a request unless it sets ignore_eos. speculation: None: no drafts
    """

    def __init__(
        self, config: SchedulerConfig, eos_token_ids: tuple[int, ...] = (), speculation: Speculation | None = None
    ) -> None:
        self.config = config
        self.counters = Counters()
        self.kv = KVManager(config)
        self.adapters = AdapterSlots(config.num_adapter_slots)
        self._eos_token_ids = eos_token_ids
        self._speculation = speculation
        self._tenants = TenantShares(config.num_slots, config.num_pages, config.max_num_batched_tokens)
        self._waiting = WaitingQueue(config, lambda request: self.kv.match(request).depth, self._tenants)
        self._running = RunningSet()
        self._live: dict[str, Request] = {}
        self._timers = Timers()
        self.in_flight = StepsInFlight()
        self._num_chunk_tokens = 0  # prompt tokens of the last step
        self._step = 0  # number of the last scheduled step
        self._last_read = 0  # number of the last step whose tokens were read
        self._ratio = NewTokenRatio(config.new_token_ratio)
        if self.kv.states is None:
            self._prefills = PrefillsInProgress(config.page_size, config.prefix_cache)
        else:
            self._prefills = PrefillsInProgress(
                config.page_size, config.prefix_cache, self.kv.served, self.kv.num_usable
            )
        self._progress = PromptProgress(self.kv, self._prefills)
        self.batch_policy = make_policy(config)
        self.step_sizes = config.step_sizes
        self._preemption = Preemption(
            Room(self._ratio, self.kv), self._running, self._tenants, self.counters, self._preempt
        )
        self._admitter = Admitter(
            self.kv, self._waiting, self._running, self._prefills, self._preemption, self.counters, self.adapters
        )
        self._tried_alone: Collection[str] | None = None  # `only` of the last step
        self._batch_waits = False  # batch requests could not start in the last step
        self.pictures = None if config.pictures is None else PicturePool(config.pictures)
        self._uninitialized: list[Request] = []  # they have a slot and no chunk yet, as their picture has no rows
        start, num_cached = self._admitter.start, self._admitter.num_cached
        reach = self.kv.prompt_reach if self.pictures is None else self._reach
        self._shares = PromptShares(start, num_cached, reach, self._tenants.key_of, config.whole_prompts)

    # --- requests come and go

    @property
    def has_work(self) -> bool:
        return bool(self._live or self.in_flight)

    @property
    def live_ids(self) -> Collection[str]:
        return self._live.keys()

    def add(self, request: Request) -> None:
        """Queue a request. Raises like `SchedulerConfig.check_fits`. AsyncEngine enforces the limits of the queue."""
        self.config.check_fits(request.num_prompt_tokens, request.max_tokens)
        if request.request_id in self._live:
            raise InvalidValueError(f"request id {request.request_id} is in use", param="request_id")
        resolve(request, self._eos_token_ids)
        ask_prompt_outputs(request)
        request.queued_step = self._step
        request.priority = self.config.rank(request.priority)
        self._live[request.request_id] = request
        self._tenants.add(request)
        self.adapters.add(request)
        self.batch_policy.count(request, 1)
        if request.output_token_ids:
            self._waiting.push_front(request)  # resumed: its client has already seen tokens
        else:
            self._waiting.push(request)
        self._admitter.arrived(request)
        self._timers.watch(request, self.config.queue_timeout)

    def find(self, request_id: str) -> Request | None:
        """Return the live request with this id; None if it has ended."""
        return self._live.get(request_id)

    def end_resumed(self, request_id: str) -> TokenOutput | None:
        """Return the last output of a resumed request whose output was already complete; None if it continues."""
        request = self._live[request_id]
        _, reason, stop_token_id = end_of(request, len(request.output_token_ids))
        return self._finish(request, reason, stop_token_id=stop_token_id) if reason else None

    def expire(self, now: float) -> list[TokenOutput]:
        """End the requests whose deadline or queue timeout has passed. Returns their last outputs."""
        outputs: list[TokenOutput] = []
        self.kv.held.expire(now)
        for request_id in self._timers.due(now):
            request = self._live.get(request_id)
            if request is not None and (message := overdue(request, now, self.config.queue_timeout)):
                outputs.append(self._finish(request, FinishReason.ERROR, error=message, error_status=504))
        return outputs

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenOutput | None:
        """Abort a request in any state. Returns its last output, or None if it has ended already."""
        request = self._live.get(request_id)
        return self._finish(request, reason) if request else None

    def fail(self, request_id: str, error: str, status: int = 500) -> TokenOutput | None:
        """End a request with an error. Returns its last output, or None if it has ended already."""
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
        request.finish_reason = reason
        if request.status is RequestStatus.RUNNING:
            self._leave_device(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._live[request.request_id]
        self._tenants.remove(request)
        self.adapters.remove(request)
        self.batch_policy.count(request, -1)
        self.counters.count_end(reason)
        if self._speculation is not None:
            self._speculation.forget(request)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=token_ids or [],
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=0 if request.is_answered else request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            error=error,
            error_status=error_status,
        )

    def _leave_device(self, request: Request) -> None:
        self._running.has_ended = True
        self._tenants.left(request)
        self._prefills.remove(request)
        if self.pictures is not None:
            self.pictures.release(request)
            self._uninitialized = [other for other in self._uninitialized if other is not request]
        self.adapters.release(request)
        self.kv.release(request, self._last_read)

    def recover(self) -> list[str]:
        """Drop steps in flight and all pages: the device's state is lost. Returns the live requests of those steps."""
        ids = [request_id for request_id in self.in_flight.request_ids() if request_id in self._live]
        self.in_flight.clear()
        self._last_read = self._step
        self.kv.recover()
        self.kv.retire(self._step)
        self.preempt_all()
        if self.pictures is not None:
            self.pictures.flush()
        self.adapters.forget()
        for request in self._live.values():
            request.num_inflight_tokens = 0
        return ids

    def preempt_all(self, *, prompts_only: bool = False) -> None:
        """Return running requests to the queue: all, or those without output. Their KV is computed again."""
        for request in reversed(self._running.best_first(prompts_only=prompts_only)):
            self._preempt(request)

    def waits_for_read(self, now: float) -> bool:
        """Return whether the step in flight must be read before the next one is scheduled. now: seconds"""
        return bool(self.in_flight) and not self.batch_policy.runs_ahead(self.in_flight.newest, now)

    @property
    def wants_drafts(self) -> bool:
        """Whether the step in flight must be read first, because the next one should have drafts."""
        if self._speculation is None or not self.in_flight:
            return False
        self._running.drop_ended()  # nothing may be proposed for them, or the drafter would keep it for ever
        newest, decoding = self.in_flight.newest, self._running.decoding
        return self._speculation.must_read_first(newest, decoding, prompts=self._expects_prompts)

    @property
    def _expects_prompts(self) -> bool:
        """Whether the next step will probably have a prompt."""
        return bool(self._running.prefilling or (self._waiting and self.kv.num_free_slots))

    def _reach(self, request: Request, end: int) -> int:
        """Return the position, at most `end`, up to which a running prompt has pages and pictures in this step."""
        assert self.pictures is not None
        return self.pictures.reach(request, self.kv.prompt_reach(request, end))

    # --- scheduling a step

    def schedule(self, now: float, only: Collection[str] | None = None) -> SchedulerOutput | None:
        """Return the next step; None if nothing can run before a read.

        now: seconds. only: ids of the waiting requests that may start; None: all
        """
        running, policy = self._running, self.batch_policy
        running.drop_ended()
        self._preemption.make_room(len(self._waiting))
        step = StepBuilder(self._step + 1, self.kv, self.pictures)
        self._waiting.age(step.number)
        online_prompts = self._waiting.num_online > 0 or bool(policy.online(running.prefilling))
        joins = policy.joins(len(self._live), online_prompts, now) or only is not None
        self._tried_alone, self._batch_waits = only, not joins
        step.add_decodes(running.decoding if joins else policy.online(running.decoding))
        self._add_prompts(step, now, only, batch=joins)
        # An online request that waits for pages or a slot of a step in flight must not wait longer for a batch request.
        leaving = self._waiting.num_online > 0 and self.kv.has_leaving
        if not (joins or step.has_prompt or leaving):
            self._add_prompts(step, now, only, batch=True)
            if not step.has_prompt:
                step.add_decodes(policy.batch(running.decoding))
            self._batch_waits = False
        step.fit(self.step_sizes)
        running.promote()
        if self._speculation is not None and not (step.has_prompt or self.in_flight):
            self._speculation.offer(step)
        if self._speculation is not None:
            self._speculation.ask(step, prompts=self._expects_prompts)
        encodes = self.pictures is not None and self.pictures.has_work
        return self._dispatch(step) if step.rows or encodes else None

    def _add_prompts(self, step: StepBuilder, now: float, only: Collection[str] | None, *, batch: bool) -> None:
        """Divide the step's prompt tokens among prompts. only: as in `schedule`. batch: include batch requests."""
        policy, rows = self.batch_policy, step.num_decode_rows
        prompts = self._running.prefilling.copy() if batch else policy.online(self._running.prefilling)
        waiting = [] if step.short_of_pages else self._admitter.open(step.number, now, batch=batch, only=only)
        if not (prompts or waiting):
            return
        room = self.config.max_num_batched_tokens - rows
        budget = min(room, policy.budget(rows, batch=batch and policy.num_batch > 0, now=now))
        budget = min(budget, self._tenants.limit(budget, (*prompts, *waiting), self._num_chunk_tokens))
        shares = self._shares.divide(budget, prompts, waiting, step.number)
        for request in self._admitter.started if waiting else ():
            policy.started(request, request.num_prefill_tokens - request.num_computed_tokens)
            self._uninitialized.append(request)
        for request in [request for request in self._uninitialized if request in shares]:
            self._uninitialized.remove(request)
            step.init_slot(request, self._eos_token_ids)
        for request, num_tokens in shares.items():
            step.add_chunk(request, num_tokens)

    def _dispatch(self, step: StepBuilder) -> SchedulerOutput:
        output = step.build(self.adapters.take_writes())
        self._step = step.number
        self.in_flight.add(output, step.requests)
        if self._tenants.counts:
            self._tenants.charge(output.rows, step.requests)
        num_decodes, chunks = output.num_decode_rows, output.rows[output.num_decode_rows :]
        num_first = sum(row.samples and not row.embed for row in chunks)
        self._num_chunk_tokens = sum(row.num_tokens for row in chunks)
        self.counters.count_step(self._num_chunk_tokens, num_decodes + num_first)
        if num_decodes:
            self._ratio.decay()
        return output

    def _preempt(self, request: Request) -> None:
        logger.debug("request %s is preempted after %d tokens", request.request_id, request.num_tokens)
        self._leave_device(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._waiting.push_front(request)
        self._running.drop_ended()

    def waiting(self, limit: int) -> list[tuple[Request, WaitReason]]:
        """Return at most `limit` waiting requests in the order of the policy, each with the reason why it waits."""
        return [(request, self._reason(request)) for request in self._waiting.first(limit)]

    def _reason(self, request: Request) -> WaitReason:
        if self._tried_alone is not None and request.request_id not in self._tried_alone:
            return WaitReason.ISOLATION
        if self._batch_waits and not request.aged and request.priority >= self.config.rank(BACKGROUND_PRIORITY):
            return WaitReason.ONLINE_FIRST
        return self._admitter.reason(request)

    # --- rows with a late token mask

    def take_back(self, rows: Sequence[int]) -> None:
        """Cancel rows of the newest step: they yield no token, and their last tokens are computed again.

        A prompt that ends with a picture is preempted, since a decode row would take the picture's last token for text.
        """
        for request in self.in_flight.take_back(rows):
            ends_with_picture = bool(request.pictures) and request.pictures[-1].end == request.num_tokens
            if ends_with_picture and request.status is RequestStatus.RUNNING:
                self._preempt(request)

    def resume(self, request_id: str) -> None:
        """Resume a paused request: its token mask is ready."""
        if (request := self._live.get(request_id)) is not None:
            request.is_paused = False

    # --- reading a step

    def update(self, output: SchedulerOutput, sampled: SampledTokens, now: float) -> list[TokenOutput]:
        """Process the tokens of the oldest step in flight. Raises ValueError for any other step."""
        requests = self.in_flight.take(output)
        self._last_read = output.step
        self.counters.encode_seconds += sampled.encode_seconds
        fine, finished = int(RowStatus.FINE), RequestStatus.FINISHED  # looked up once: it takes 0.1 us
        outputs: list[TokenOutput] = []
        token_ids, num_valid, status = sampled.token_ids.tolist(), sampled.num_valid.tolist(), sampled.status.tolist()
        logprobs = None if sampled.logprobs is None else StepLogprobs(sampled, output.rows)
        first_chunk = output.num_decode_rows
        for i, (row, request) in enumerate(zip(output.rows, requests, strict=True)):
            if i >= first_chunk:
                self._read_chunk(request, row, i, sampled)
            most = 1 + len(row.drafts) if row.drafts else 1
            if samples := row.samples:
                request.num_inflight_tokens -= most
            if request.status is finished:
                self.counters.dropped_tokens += num_valid[i] if samples else 0
            elif status[i] != fine:
                outputs.append(self._fail_row(request, status[i]))
            elif not samples:
                continue
            elif row.embed:
                outputs.append(self._end_with_embedding(request, i, sampled, now))
            elif row.extras is not None and (error := too_many_candidates(row, i, sampled.extras)):
                outputs.append(self._finish(request, FinishReason.ERROR, error=error, error_status=400))
            else:
                new = token_ids[i]
                if num_valid[i] != len(new):
                    request.num_computed_tokens -= most - num_valid[i]
                    new = new[: num_valid[i]]
                result = self._accept(request, row, new, now)
                if row.logprobs is not None and logprobs is not None:
                    result.logprobs = logprobs.of_row(i, result.token_ids, row.logprobs)
                    add_extras(result, row, i, sampled.extras)
                outputs.append(result)
        if sampled.drafts is not None:
            self._take_drafts(requests, sampled.num_valid, sampled.drafts)
        self._progress.advance_groups(output.rows, requests)
        self.kv.retire(output.step)
        return outputs

    def _read_chunk(self, request: Request, row: ScheduledRow, index: int, sampled: SampledTokens) -> None:
        """Store the values of a chunk's prompt tokens that the request asks for. Share its pages if it is finite."""
        gather_prompt_outputs(request, row, index, sampled)
        if sampled.status[index] != RowStatus.NOT_FINITE:
            self._progress.share_chunk(request, row)

    def _accept(self, request: Request, row: ScheduledRow, new: list[int], now: float) -> TokenOutput:
        """Append a row's tokens and check whether they end the request."""
        output = request.output_token_ids
        output += new
        num_drafts = None if self._speculation is None else self._speculation.accept(request, row.drafts, new)
        first = not request.prompt_done
        if first:
            self._progress.complete_prompt(request)
        if len(output) < request.max_tokens and request.stop_token_ids.isdisjoint(new):
            result = TokenOutput(request_id=request.request_id, token_ids=new)
        else:
            result = self._end_or_go_on(request, new)
        if num_drafts is not None:
            result.num_accepted_drafts, result.num_rejected_drafts = num_drafts
        self.counters.generation_tokens += len(result.token_ids)
        if first:
            report_first(request, result, now, self.counters)
        return result

    def _take_drafts(self, requests: list[Request], num_valid: np.ndarray, drafts: np.ndarray) -> None:
        """Keep the drafts that the device proposed for the rows that yielded a token. The arrays: see SampledTokens"""
        assert self._speculation is not None
        for request, count, proposed in zip(requests, num_valid, drafts, strict=True):
            if count and request.status is RequestStatus.RUNNING:
                self._speculation.take(request, proposed.tolist())

    def _end_with_embedding(self, request: Request, row: int, sampled: SampledTokens, now: float) -> TokenOutput:
        assert sampled.embeddings is not None
        self._progress.complete_prompt(request)
        output = self._finish(request, FinishReason.STOP)
        output.embedding = sampled.embeddings[row].tobytes()
        report_first(request, output, now, self.counters)
        return output

    def _end_or_go_on(self, request: Request, new: list[int]) -> TokenOutput:
        count, reason, stop_token_id = end_of(request, len(new))
        if reason is None:
            return TokenOutput(request_id=request.request_id, token_ids=new)
        del request.output_token_ids[len(request.output_token_ids) - len(new) + count :]
        return self._finish(request, reason, new[:count], stop_token_id)

    def _fail_row(self, request: Request, status: int) -> TokenOutput:
        if status == RowStatus.NOTHING_ALLOWED:
            error = nothing_allowed(request.params)
            return self._finish(request, FinishReason.ERROR, error=error, error_status=400)
        self.kv.discard(request)
        return self._finish(request, FinishReason.ERROR, error="the model's output was not finite (NaN or infinity)")

    # --- statistics and consistency checks

    def stats(self) -> SchedulerStats:
        """Return the current gauges and a copy of the counters."""
        return SchedulerStats(
            num_running=len(self._live) - len(self._waiting),
            **self._waiting.counts(),
            **self.kv.page_counts(),
            new_token_ratio=self._ratio.value,
            counters=copy.copy(self.counters),
            drafts=copy.deepcopy(self._speculation.counters) if self._speculation is not None else None,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page, slot and request is accounted for exactly once."""
        running = self._running.check_integrity()
        ids = [request.request_id for request in itertools.chain(running, self._waiting.check_integrity())]
        assert sorted(ids) == sorted(self._live), "a request is lost or in two places"
        self.kv.check_integrity(running)
        if self.pictures is not None:
            self.pictures.check_integrity(set(running))
        self.adapters.check_integrity(running, self._live.values())
