"""The token-level engine: a scheduler and a runner. The device runs one step ahead of the host's reading.

step t+1 is scheduled and dispatched  ->  the tokens of step t are read  ->  masks for t+1, which depend on them

If `Scheduler.waits_for_read` is true, a step is read before the next one is scheduled. While batch requests run
beside online requests on a CPU, at most one step with a prompt or two decode steps are in flight. This bounds how
long a new online request waits. A step with drafts is made from all tokens of the step before it, which is read first.

RequestFactory validates an EngineRequest and makes a Request of it. CompilingRequests holds the requests whose grammar
is being compiled; they cannot be scheduled yet. ServingState says whether steps run, and with which weights.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import HTTPError, InvalidSchemaError, InvalidValueError, JaxserveError, UnsupportedParameterError
from jaxserve.grammar.mask_table import FillRows, MaskTable
from jaxserve.grammar.token_mask import Matcher, TokenMask
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.scheduler_stats import SchedulerStats
from jaxserve.scheduler.speculation import Speculation
from jaxserve.scheduler.stopping import Timers, check_allowed, overdue
from jaxserve.scheduler.waiting_queue import WaitReason
from jaxserve.speculation.ngram import Drafter
from jaxserve.types.calls import Mode, Tag
from jaxserve.types.extras import MAX_LOGPROB_IDS
from jaxserve.types.fault_isolator import FaultIsolator
from jaxserve.types.messages import EngineStats, WaitingRequest
from jaxserve.types.page_keys import with_pictures
from jaxserve.types.picture import PictureInfo, check_pictures
from jaxserve.types.sampling import MAX_LOGIT_BIAS, EngineRequest, GrammarSpec, SamplingParams
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import (
    FIRST_VERSION,
    FinishReason,
    MaskBudget,
    Request,
    SchedulerOutput,
    StepHandle,
    StepRunner,
    TokenOutput,
)

if TYPE_CHECKING:  # it imports JAX, which a core with a runner of its own does not need
    from jaxserve.engine.adapters import Adapters

logger = logging.getLogger(__name__)


def adapters_off(param: str) -> InvalidValueError:
    """Return the error of a field that names an adapter where there is no room for any."""
    return InvalidValueError("adapters are not served; set lora.slots", param=param)


Prepare = Callable[[GrammarSpec], Future[Any]]  # compiles a grammar in a thread; the future's result is a Matcher


class CompilingRequests:
    """Holds requests until their grammars are compiled.

    queue_timeout: seconds that a request may wait here and in the scheduler's queue together; None: no limit
    """

    def __init__(self, queue_timeout: float | None) -> None:
        self.num_tokens = 0  # prompt tokens of the waiting requests
        self._queue_timeout = queue_timeout
        self._requests: dict[str, tuple[Request, Future[Any]]] = {}
        self._timers = Timers()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    @property
    def ids(self) -> list[str]:
        return list(self._requests)

    def requests(self) -> list[Request]:
        return [request for request, _ in self._requests.values()]

    def add(self, request: Request, matcher: Future[Any]) -> None:
        self._requests[request.request_id] = request, matcher
        self.num_tokens += request.num_prompt_tokens
        self._timers.watch(request, self._queue_timeout)

    def remove(self, request_id: str) -> Request | None:
        """Remove and return a request; None if it does not wait here. Cancels its compilation if that has not begun."""
        if request_id not in self._requests:
            return None
        request, matcher = self._requests.pop(request_id)
        self.num_tokens -= request.num_prompt_tokens
        matcher.cancel()
        return request

    def take_compiled(self) -> list[tuple[Request, Future[Any]]]:
        """Remove and return the requests whose compilation has ended, successfully or not."""
        done = [entry for entry in self._requests.values() if entry[1].done()]
        for request, _ in done:
            self.remove(request.request_id)
        return done

    def take_overdue(self, now: float) -> list[tuple[Request, str]]:
        """Remove and return the requests that have timed out, each with the reason. now: time.monotonic() seconds"""
        ended: list[tuple[Request, str]] = []
        for request_id in self._timers.due(now):
            entry = self._requests.get(request_id)
            if entry is not None and (reason := overdue(entry[0], now, self._queue_timeout)):
                self.remove(request_id)
                ended.append((entry[0], reason))
        return ended


MakeMatcher = Callable[[GrammarSpec], Matcher]


class RequestFactory:
    """Makes Requests of valid EngineRequests.

    generates: False for an embedding model. seed: the seeds of requests without one are derived from it.
    pictures: the pictures that the model takes; None: it takes none
    adapters: returns the engine's adapters; None: there is room for none
    """

    def __init__(
        self,
        config: SchedulerConfig,
        vocab_size: int,
        generates: bool,
        seed: int,
        clock: Callable[[], float],
        pictures: PictureInfo | None = None,
        adapters: Callable[[], Adapters | None] = lambda: None,
    ) -> None:
        self._adapters = adapters
        self._config = config
        self._pictures = pictures
        self._vocab_size = vocab_size
        self._generates = generates
        self._seeds = random.Random(seed)
        self._clock = clock

    def make(self, requests: Sequence[EngineRequest], prompt: np.ndarray | None = None) -> list[Request]:
        """Return the Requests, in order. Raises RequestError.

        If consecutive requests share a prompt, it is validated once.

        prompt: int32 [n], the prompt of all requests, if the caller has it as an array
        """
        checked: list[int] | None = None
        keys: list[int] | None = None  # of the checked prompt
        records: list[Request] = []
        for request in requests:
            if request.prompt_token_ids is not checked:
                checked = request.prompt_token_ids
                self._check_tokens(np.asarray(checked) if prompt is None else prompt)
                check_pictures(request.pictures, self._pictures, checked)
                keys = with_pictures(checked, request.pictures, self._config.page_size) if request.pictures else None
            self._check_tokens(np.asarray(request.resumed_token_ids))
            records.append(self._record(request, keys))
        return records

    def _check_tokens(self, tokens: np.ndarray) -> None:
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self._vocab_size):
            raise InvalidValueError(f"token ids must be in [0, {self._vocab_size})", param="prompt")

    def _check(self, request: EngineRequest) -> None:
        params = request.params
        if not (params.embed or self._generates):
            raise InvalidValueError("the model makes embeddings or classifies, and generates no text", param="model")
        if params.max_tokens is not None and params.max_tokens < 0:
            raise InvalidValueError(f"max_tokens is {params.max_tokens}", param="max_tokens")
        if request.deadline is not None and not math.isfinite(request.deadline):
            raise InvalidValueError(f"the deadline is {request.deadline} s", param="timeout")
        sampled = 0 if params.embed or params.max_tokens == 0 else 1
        self._config.check_fits(len(request.prompt_token_ids), sampled)
        self._check_logit_bias(params.logit_bias)
        self._check_bad_words(params.bad_words_token_ids)
        self._check_extras(params)
        check_allowed(params, self._vocab_size)
        if request.adapter:
            if (adapters := self._adapters()) is None:
                raise adapters_off("model")
            adapters.check(request.adapter)

    def _check_logit_bias(self, bias: dict[int, float]) -> None:
        if len(bias) > MAX_LOGIT_BIAS or not all(0 <= token < self._vocab_size for token in bias):
            message = f"logit_bias takes at most {MAX_LOGIT_BIAS} token ids in [0, {self._vocab_size})"
            raise InvalidValueError(message, param="logit_bias")

    def _check_bad_words(self, words: Sequence[Sequence[int]]) -> None:
        if not all(word and all(0 <= token < self._vocab_size for token in word) for word in words):
            message = f"each of bad_words_token_ids has one token id or more, in [0, {self._vocab_size})"
            raise InvalidValueError(message, param="bad_words")

    def _check_extras(self, params: SamplingParams) -> None:
        if not params.extras.wanted:
            return
        ids = params.extras.logprob_token_ids
        if len(ids) > MAX_LOGPROB_IDS or not all(0 <= token < self._vocab_size for token in ids):
            message = f"at most {MAX_LOGPROB_IDS} token ids in [0, {self._vocab_size}) can be given"
            raise InvalidValueError(message, param="logprob_token_ids")
        if params.logprobs is None or params.embed:
            raise InvalidValueError("extra outputs are given with log-probabilities only", param="logprobs")

    def _record(self, request: EngineRequest, keys: list[int] | None) -> Request:
        self._check(request)
        params, prompt = request.params, request.prompt_token_ids
        room = self._config.max_sequence_tokens - len(prompt)
        max_tokens = 0 if params.embed else params.max_tokens
        now = self._clock()
        return Request(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            params=params,
            arrival=now,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            priority=request.priority,
            tenant=request.tenant,
            namespace=request.namespace,
            adapter=request.adapter,
            group=request.group,
            client_id=request.client_id,
            is_answered=request.is_answered,
            deadline=None if request.deadline is None else now + request.deadline,
            hold_seconds=request.hold_seconds,
            prefilled=request.prefilled,
            pictures=request.pictures,
            picture_keys=keys,
            output_token_ids=list(request.resumed_token_ids),
        )


def make_mask(record: Request, make_matcher: MakeMatcher | None) -> TokenMask | None:
    """Return the token mask of a request; None if it needs none. Raises RequestError."""
    params = record.params
    if params.grammar is None:
        return TokenMask.of(params, None)
    if make_matcher is None:
        raise UnsupportedParameterError("this engine has no grammars", param="response_format")
    try:
        return TokenMask.of(params, make_matcher(params.grammar), record.mask_budget)
    except HTTPError:
        raise
    # The boundary of one request: if its grammar makes the compiler raise anything, only this request ends.
    except Exception as error:
        raise InvalidSchemaError(f"the grammar cannot be used: {error}", param="response_format") from error


@dataclass
class ServingState:
    """The state of an engine after pauses, sleep and weight updates.

    paused: the mode of the pause; None: not paused. asleep: the memory that was freed on the devices
    version: label of the weights, chosen by clients
    updated: time.monotonic() of the latest weight update; 0: there was none
    weights: number that the API process gave to that update and never gives again; 0: it gave none
    """

    paused: Mode | None = None
    asleep: set[Tag] = field(default_factory=set)
    version: str = FIRST_VERSION
    num_updates: int = 0
    updated: float = 0.0
    weights: int = 0

    @property
    def halted(self) -> bool:
        """Return whether no step may run. Requests are accepted and wait."""
        return self.paused is not None or bool(self.asleep)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return TokenOutput.weight_versions for tokens that are made now."""
        return () if self.version == FIRST_VERSION else (self.version,)


# counters without a named field in EngineStats
COUNTERS = (
    "recomputed_tokens",
    "stateless_tokens",
    "dropped_tokens",
    "retractions",
    "retraction_events",
    "priority_preemptions",
    "admissions",
    "queue_seconds",
    "first_tokens",
    "first_token_seconds",
    "finished_stop",
    "finished_length",
    "finished_abort",
    "finished_error",
    "pages_written",
    "pages_read",
)


def engine_stats(
    stats: SchedulerStats,
    compiling: CompilingRequests,
    *,
    compiles: int,
    host_seconds: float,
    details: dict[str, float],
    serving: ServingState,
    adapters: Adapters | None,
) -> EngineStats:
    """Return the gauges and counters that the engine process reports.

    details: further values that only the metrics show
    """
    counters = stats.counters
    return EngineStats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting + len(compiling),
        num_compiling=len(compiling),
        num_waiting_tokens=stats.num_waiting_tokens + compiling.num_tokens,
        num_pages_free=stats.num_pages_free,
        num_pages_cached=stats.num_pages_cached,
        num_pages_used=stats.num_pages - stats.num_pages_free - stats.num_pages_evictable,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        computed_prompt_tokens=counters.prefill_tokens,
        cached_tokens=counters.cached_tokens,
        generation_tokens=counters.generation_tokens,
        preemptions=counters.retractions + counters.priority_preemptions,
        compiles=compiles,
        host_seconds=host_seconds,
        step_tokens=counters.step_tokens,
        step_sizes=list(counters.step_sizes),
        drafts=stats.drafts,
        weight_version=serving.version,
        adapters=[] if adapters is None else adapters.statuses(),
        details={
            **details,
            "weight_updates": serving.num_updates,
            "paused": float(serving.paused is not None),
            "asleep": float(bool(serving.asleep)),
            "requests_preempted": stats.num_preempted,
            "pages_evictable": stats.num_pages_evictable,
            "host_pages_used": stats.num_host_pages_used,
            "host_pages_stored": stats.num_host_pages_stored,
            "host_pages_loaded": stats.num_host_pages_loaded,
            "window_pages_used": sum(stats.group_pages_used),
            **{f"group_{index}_pages_used": used for index, used in enumerate(stats.group_pages_used, start=1)},
            "states_used": stats.num_state_pages_used,
            "states_cached": stats.num_state_pages_cached,
            "new_token_ratio": stats.new_token_ratio,
            **({} if adapters is None else adapters.counts()),
            **{name: float(getattr(counters, name)) for name in COUNTERS},
        },
    )


# output tokens from before a restart that the loop passes to the grammar; a thread handles longer outputs
MAX_RESUMED = 256
MAX_WAITING_SHOWN = 1024  # waiting requests whose reasons are shown; 2 us each
MASK_WAIT = 0.002  # seconds that `step` waits for a thread to compute a token mask if it can do nothing else


class StepError(JaxserveError):
    """The device failed while a step was dispatched or its tokens were read. The device's state counts as lost."""


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """The options of an EngineCore, beside its runner and the scheduler's configuration.

    eos_token_ids, vocab_size    the model's
    seed                         the seeds of requests without one are derived from it
    make_matcher                 compiles a grammar; None: requests with a grammar are refused
    generates                    False: an embedding model
    fill_masks                   computes the masks of many grammars at once; None: one after the other
    mask_threads                 compute slow masks; None: every step waits for its masks
    drafter                      guesses tokens; None: no speculation
    on_close                     called when the core is closed
    pictures                     the pictures that the model takes; None: requests with pictures are refused
    clock                        returns seconds; they only increase
    """

    vocab_size: int
    eos_token_ids: Iterable[int] = ()
    seed: int = 0
    make_matcher: MakeMatcher | None = None
    generates: bool = True
    fill_masks: FillRows | None = None
    mask_threads: Executor | None = None
    drafter: Drafter | None = None
    on_close: Callable[[], object] = lambda: None
    pictures: PictureInfo | None = None
    clock: Callable[[], float] = time.monotonic


class EngineCore:
    """Runs requests. Each request that `add` accepts gets exactly one TokenOutput with a finish reason."""

    def __init__(self, runner: StepRunner, config: SchedulerConfig, options: CoreOptions) -> None:
        self.runner = runner
        self._masks = MaskTable(options.vocab_size, options.fill_masks, options.mask_threads)
        speculation = None if options.drafter is None else Speculation(options.drafter, self._masks, config)
        self.scheduler = Scheduler(config, tuple(options.eos_token_ids), speculation)
        self.adapters: Adapters | None = None  # set by what makes the engine, if there is room for any
        self._requests = RequestFactory(
            config,
            options.vocab_size,
            options.generates,
            options.seed,
            options.clock,
            options.pictures,
            lambda: self.adapters,
        )
        self._make_matcher = options.make_matcher
        self._on_close = options.on_close
        self._clock = options.clock
        self._isolator = FaultIsolator()
        self._compiling = CompilingRequests(config.queue_timeout)
        self.serving = ServingState()
        self.admitted: list[str] = []  # ids of the requests that the last call of `step` gave a slot
        self._of_adapters: dict[str, str] = {}  # by the ids of live requests with an adapter: NAME@VERSION
        self._outputs: list[TokenOutput] = []  # returned by the next `step`
        self._previous: tuple[SchedulerOutput, StepHandle] | None = None  # dispatched, not read yet
        self._rebuilds = 0
        self._scheduler_seconds = self._host_seconds = 0.0

    # --- requests

    def add(self, *requests: EngineRequest, prompt: np.ndarray | None = None, prepare: Prepare | None = None) -> None:
        """Queue the sequences: all of them, or none. Raises RequestError. AsyncEngine enforces the limits of the queue.

        prompt: int32 [n], the token ids of the prompt that all sequences share, if the caller has them as an array
        prepare: compiles a grammar in a thread while the sequences wait; None: compile it here
        """
        self._check_ids([request.request_id for request in requests])
        records = self._requests.make(requests, prompt)
        grammar, budgets = requests[0].params.grammar, dict[str, MaskBudget]()
        for record in records:
            record.mask_budget = budgets.setdefault(record.group or record.request_id, MaskBudget())
        if prepare is not None and grammar is not None and self._make_matcher is not None:
            for record in records:
                self._compiling.add(record, prepare(grammar))
            return
        masks = [make_mask(record, self._make_matcher) for record in records]
        for record, mask in zip(records, masks, strict=True):
            self._queue(record, mask)

    def _check_ids(self, ids: list[str]) -> None:
        for request_id in ids:
            if request_id in self._compiling or self.scheduler.find(request_id) is not None:
                raise InvalidValueError(f"request id {request_id} is in use", param="request_id")
        if len(set(ids)) < len(ids):
            raise InvalidValueError("a request id is there twice", param="request_id")

    def _queue(self, record: Request, mask: TokenMask | None) -> None:
        if record.max_tokens == 0:
            mask = None  # the one token that is sampled is dropped, so it needs no mask
        record.masked = mask is not None
        if record.adapter and self.adapters is not None:
            self.adapters.check(record.adapter)  # again: it may have been unloaded while the grammar was compiled
        self.scheduler.add(record)
        if record.adapter and self.adapters is not None:
            self._of_adapters[record.request_id] = self.adapters.label(record.adapter)
        if mask is not None:
            self._masks.add(record.request_id, mask)
        if record.output_token_ids:
            self._resume(record)

    def _queue_compiled(self, now: float) -> None:
        """Queue the requests whose grammars are compiled. End those that failed or have timed out."""
        for record, matcher in self._compiling.take_compiled():
            try:
                self._queue(record, make_mask(record, lambda _, matcher=matcher: matcher.result()))
            except HTTPError as error:
                end = self._ended(record, FinishReason.ERROR, error.message, error.status)
                end.error_param = error.param
                self._outputs.append(end)
        for record, message in self._compiling.take_overdue(now):
            self._outputs.append(self._ended(record, FinishReason.ERROR, message, 504))

    def _ended(
        self, record: Request, reason: FinishReason, error: str | None = None, error_status: int = 500
    ) -> TokenOutput:
        """Return the last output of a request that never reached the scheduler."""
        self.scheduler.counters.count_end(reason)
        return TokenOutput(request_id=record.request_id, finish_reason=reason, error=error, error_status=error_status)

    def _resume(self, record: Request) -> None:
        """Continue an output begun before a restart. It may already be complete."""
        output = self.scheduler.end_resumed(record.request_id)
        if output is None:
            output = TokenOutput(request_id=record.request_id, token_ids=record.output_token_ids)
            self._end_by_mask(output, here=len(output.token_ids) <= MAX_RESUMED)
            output.token_ids = []  # the client has them already
        if output.finish_reason is not None:
            self._deliver([output])

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[TokenOutput]:
        """Abort requests. Returns the last output of each request that had not ended.

        If a step failed after it had read tokens of these requests, the outputs with these tokens come first.
        """
        found = [self._abort(request_id, reason) for request_id in request_ids]
        ended = {output.request_id: output for output in found if output is not None}
        for request_id in ended:
            self._masks.drop(request_id)
            self._of_adapters.pop(request_id, None)
        pending, self._outputs = self._outputs, []
        first: list[TokenOutput] = []
        for output in pending:
            (first if output.request_id in ended else self._outputs).append(output)
        return [*first, *ended.values()]

    def _abort(self, request_id: str, reason: FinishReason) -> TokenOutput | None:
        record = self._compiling.remove(request_id)
        return self._ended(record, reason) if record is not None else self.scheduler.abort(request_id, reason)

    # --- steps

    @property
    def is_compiling(self) -> bool:
        """Return whether requests wait for their grammars. `step` queues them without waiting."""
        return len(self._compiling) > 0

    @property
    def compiling_ids(self) -> list[str]:
        """Return the ids of the requests that wait for their grammars."""
        return self._compiling.ids

    @property
    def live_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended."""
        return [*self._compiling.ids, *self.scheduler.live_ids]

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to do."""
        return bool(self._outputs or (not self.serving.halted and (self._previous or self.scheduler.has_work)))

    def step(self) -> list[TokenOutput]:
        """Dispatch the next step, then read the previous one. Returns the new outputs since the last call.

        It only reads if the step in flight must be read before the next one is scheduled; see the module docstring.
        Dispatches nothing while halted. Raises StepError if the device failed; then call `recover` first.
        """
        began = self._clock()
        self.admitted = []
        if self._compiling:
            self._queue_compiled(began)
        if self._previous is not None and self.scheduler.waits_for_read(began):
            self._read_previous()
            return self._take_outputs()
        if self.scheduler.wants_drafts:
            self._read_previous()
            began = self._clock()
        self._take_masks()
        self._deliver(self.scheduler.expire(began))
        if self._isolator:
            self._isolator.keep(self.scheduler.live_ids)
        if self.serving.halted:
            return self._take_outputs()
        output = self.scheduler.schedule(began, self._isolator.quarantined)
        self._scheduler_seconds += self._clock() - began
        handle = self._execute(output) if output is not None else None
        self.admitted = [] if output is None else output.admitted_ids
        self._host_seconds += self._clock() - began
        if output is None and self._previous is None:
            self._masks.wait(MASK_WAIT)
        self._read_previous()
        if output is not None and handle is not None:
            if output.masked:
                self._sample(output, handle)
            self._previous = (output, handle)
        return self._take_outputs()

    def _take_outputs(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _execute(self, output: SchedulerOutput) -> StepHandle:
        with _device_work():
            return self.runner.execute(output)

    def _read_previous(self) -> None:
        if self._previous is None:
            return
        output, handle = self._previous
        with _device_work():
            sampled = handle.result()
        self._previous = None
        began = self._clock()
        outputs = self.scheduler.update(output, sampled, began)
        self._isolator.succeeded((output.request_id, output.finish_reason is not None) for output in outputs)
        self._deliver(outputs)
        spent = self._clock() - began
        self._scheduler_seconds += spent
        self._host_seconds += spent

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        if self.serving.labels or self.serving.weights:
            for output in outputs:
                output.weight_versions = self.serving.labels if output.is_made else ()
                output.weights = self.serving.weights
        if len(self._masks):
            for output in outputs:
                self._end_by_mask(output)
        if self._of_adapters:
            self._name_adapters(outputs)
        self._outputs += outputs

    def _name_adapters(self, outputs: list[TokenOutput]) -> None:
        """Add NAME@VERSION of its adapter to the labels of the weights that made an output."""
        for output in outputs:
            ended = output.finish_reason is not None
            label = (self._of_adapters.pop if ended else self._of_adapters.get)(output.request_id, None)
            if label is not None and output.is_made:
                output.weight_versions = (*(output.weight_versions or (FIRST_VERSION,)), label)

    def _end_by_mask(self, output: TokenOutput, *, here: bool = True) -> None:
        """End the request if its grammar is complete, or with an error if the tokens violate the grammar.

        here: as in `MaskTable.advance`
        """
        reason = self._masks.advance(output, here=here)
        if reason is FinishReason.ERROR:
            output.error, output.error_status = self._masks.failure(output.request_id)
            self.scheduler.fail(output.request_id, output.error, output.error_status)
        elif reason is not None:
            self.scheduler.abort(output.request_id, reason)
        output.finish_reason = reason or output.finish_reason
        if output.finish_reason is not None:
            self._masks.drop(output.request_id)

    def _sample(self, output: SchedulerOutput, handle: StepHandle) -> None:
        """Finish a masked step, now that the previous tokens are known."""
        masks = self._masks.of_step(output)
        for request_id, reason in masks.ended:  # first: the table has forgotten an end that a thread found
            self._end_masked(request_id, reason)
        with _device_work():
            handle.sample(masks.bits, masks.late)
        self.scheduler.take_back(masks.late)
        self.scheduler.in_flight.pause(masks.paused)

    def _take_masks(self) -> None:
        """Resume requests whose masks are ready. Some of them have to end instead."""
        for request_id, reason in self._masks.take_ready():
            self.scheduler.resume(request_id)
            if reason is not None:
                self._end_masked(request_id, reason)

    def _end_masked(self, request_id: str, reason: FinishReason) -> None:
        if reason is FinishReason.ERROR:
            end = self.scheduler.fail(request_id, *self._masks.failure(request_id))
        else:
            end = self.scheduler.abort(request_id, reason)
        self._masks.drop(request_id)
        self._of_adapters.pop(request_id, None)
        self._outputs += [end] if end is not None else []

    def settle(self) -> None:
        """Read the step in flight, so that nothing uses the device. The next `step` returns its outputs."""
        try:
            self._read_previous()
        except StepError as error:
            logger.error("a step failed, and is computed again: %s", error, exc_info=error.__cause__)
            self.recover()

    def abort_all(self) -> None:
        """Abort every request. The next `step` returns their last outputs."""
        self._outputs = [*self.abort(self.live_ids), *self._outputs]  # `abort` takes theirs out of those that wait

    @property
    def is_isolating(self) -> bool:
        """Return whether the engine searches for the request that makes the device fail."""
        return bool(self._isolator)

    def recover(self) -> bool:
        """Recover from a StepError: allocate a new, empty cache on the device and compute running requests again.

        Delivered tokens do not change: prompts and outputs are on the host, and a token depends only on them and the
        seed of its request. A request that causes repeated failures ends with an error. Returns whether such a
        request was found while other requests succeeded.

        Raises DeviceFaultError, and the runner's exception if the device is not usable any more.
        """
        self._previous = None
        self.runner.rebuild()
        self._rebuilds += 1
        culprit = self._isolator.failed(self.scheduler.recover())
        if culprit is not None:
            record = self.scheduler.find(culprit)
            client_id = record.client_id if record is not None else ""
            logger.error("request %s (%s) ends: every step with it fails and others do not", culprit, client_id)
            end = self.scheduler.fail(culprit, "the device fails whenever it computes this request")
            self._deliver([end] if end is not None else [])
        return culprit is not None and self._isolator.has_passed

    # --- administration

    def close(self) -> None:
        """Stop the threads of masks and grammars, for which the interpreter's exit would wait, and close the runner."""
        self._masks.close()
        self._on_close()
        self.runner.close()

    def flush_prefix_cache(self, *, new_weights: bool = False) -> None:
        """Remove all cached prefixes, also from the memory of the host and its file before this returns.

        Pages in use are freed when their requests unlock them. new_weights: as in `KVManager.flush`. Raises StepError.
        """
        if self.scheduler.kv.host is not None:
            self.settle()
        self.scheduler.kv.flush(new_weights=new_weights)
        if self.scheduler.pictures is not None:
            self.scheduler.pictures.flush()
        if moves := self.scheduler.kv.take_page_moves():
            self._execute(SchedulerOutput(0, [], 0, [], page_moves=moves))

    def waiting(self, limit: int = MAX_WAITING_SHOWN) -> list[WaitingRequest]:
        """Return at most `limit` requests without a slot, each with its reason. Compiling requests come first."""
        now = self._clock()
        compiling = [(request, WaitReason.GRAMMAR) for request in self._compiling.requests()]
        found = compiling[:limit] + self.scheduler.waiting(max(0, limit - len(compiling)))
        return [
            WaitingRequest(request.request_id, request.client_id, reason.value, now - request.arrival)
            for request, reason in found
        ]

    def stats(self) -> EngineStats:
        """Return the current gauges and counters."""
        pool, stats = self.scheduler.pictures, self.scheduler.stats()
        pictures: dict[str, float] = {}
        if pool is not None:
            pictures = {"images_encoded": pool.num_encoded, "images_reused": pool.num_reused}
            pictures["image_encode_seconds"] = stats.counters.encode_seconds
        return engine_stats(
            stats,
            self._compiling,
            compiles=self.runner.num_compiles(),
            host_seconds=self._host_seconds,
            details={
                "rebuilds": self._rebuilds,
                "scheduler_seconds": self._scheduler_seconds,
                **pictures,
            },
            serving=self.serving,
            adapters=self.adapters,
        )


@contextlib.contextmanager
def _device_work() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StepError(f"{type(error).__name__}: {error}") from error
