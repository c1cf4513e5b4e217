"""The engine at token level: a scheduler and a runner, one step ahead of what the host has read. No text, no sockets.

step t+1 is scheduled and dispatched  ->  the tokens of step t are read  ->  masks for t+1, which need them

While lines of batches run beside online requests (`Courtesy.expects_online`) an arrival waits for two decode steps or
one with a prompt, and no more: a step that has a prompt, or was dispatched ahead, is read before the next is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator

from jaxserve.engine.messages import EngineStats
from jaxserve.engine.request import (
    MAX_LOGIT_BIAS,
    MAX_WATCHED,
    EngineRequest,
    FinishReason,
    GrammarSpec,
    Request,
    Runner,
    SamplingParams,
    SchedulerOutput,
    StepHandle,
    TokenOutput,
)
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.scheduler_config import SchedulerConfig
from jaxserve.engine.suspects import Suspects
from jaxserve.engine.token_mask import FillRows, MaskTable, Matcher, TokenMask
from jaxserve.errors import InvalidSchemaError, InvalidValueError, JaxserveError, UnsupportedParameterError

logger = logging.getLogger(__name__)

MakeMatcher = Callable[[GrammarSpec], Matcher]


class StepError(JaxserveError):
    """The device failed in a step, at its dispatch or when its tokens were read: what it held counts as lost."""


class EngineCore:
    """Every request that `add` accepts gets exactly one TokenOutput with a finish reason, from `step` or `abort`.

    eos_token_ids, vocab_size    the model's
    seed                         of the generator that seeds requests without a seed of their own
    make_matcher                 compiles a grammar; None: requests with a grammar are refused
    generates                    whether the model makes tokens; else embeddings only
    fill_masks                   fills the masks of many grammars at once; None: one after the other
    """

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        make_matcher: MakeMatcher | None = None,
        generates: bool = True,
        fill_masks: FillRows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(config, tuple(eos_token_ids))
        self._vocab_size = vocab_size
        self._seeds = random.Random(seed)
        self._make_matcher = make_matcher
        self._generates = generates
        self._clock = clock
        self._masks = MaskTable(vocab_size, fill_masks)
        self._suspects = Suspects()
        self._outputs: list[TokenOutput] = []  # for the next return of `step`
        self._previous: tuple[SchedulerOutput, StepHandle] | None = None  # dispatched, not read
        self._read_first = False  # see the file's docstring; of the step in flight
        self._rebuilds = 0
        self._scheduler_seconds = 0.0
        self._host_seconds = 0.0

    # --- requests

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence. Raises RequestError; the limits of the queue are asked of `scheduler.check_queue`."""
        record = self._record(request)
        mask = self._mask(request)
        record.masked = mask is not None
        self.scheduler.add(record)
        if mask is not None:
            self._masks.add(record.request_id, mask)
        if record.output_token_ids:
            self._resume(record)

    def _check_logit_bias(self, bias: dict[int, float]) -> None:
        if len(bias) > MAX_LOGIT_BIAS or not all(0 <= token < self._vocab_size for token in bias):
            message = f"logit_bias takes at most {MAX_LOGIT_BIAS} token ids in [0, {self._vocab_size})"
            raise InvalidValueError(message, param="logit_bias")

    def _check_details(self, params: SamplingParams) -> None:
        if not params.detailed:
            return
        watched = params.watched_token_ids
        if len(watched) > MAX_WATCHED or not all(0 <= token < self._vocab_size for token in watched):
            message = f"at most {MAX_WATCHED} token ids in [0, {self._vocab_size}) can be watched"
            raise InvalidValueError(message, param="logprob_token_ids")
        if params.logprobs is None or params.embed:
            raise InvalidValueError("details are given with log-probabilities only", param="logprobs")

    def _record(self, request: EngineRequest) -> Request:
        params, prompt = request.params, request.prompt_token_ids
        if not (params.embed or self._generates):
            raise InvalidValueError("the model makes embeddings and generates no text", param="model")
        if params.max_tokens is not None and params.max_tokens < 0:
            raise InvalidValueError(f"max_tokens is {params.max_tokens}", param="max_tokens")
        if request.deadline is not None and not math.isfinite(request.deadline):
            raise InvalidValueError(f"the deadline is {request.deadline} s", param="timeout")
        max_tokens = 0 if params.embed else params.max_tokens
        self.scheduler.config.check_fits(len(prompt), 0 if max_tokens == 0 else 1)
        for ids in (prompt, request.resumed_token_ids):
            if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
                raise InvalidValueError(f"token ids must be in [0, {self._vocab_size})", param="prompt")
        self._check_logit_bias(params.logit_bias)
        self._check_details(params)
        room = self.scheduler.config.max_sequence_tokens - len(prompt)
        now = self._clock()
        return Request(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            params=params,
            arrival=now,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            priority=request.priority,
            namespace=request.namespace,
            group=request.group,
            deadline=None if request.deadline is None else now + request.deadline,
            output_token_ids=list(request.resumed_token_ids),
        )

    def _mask(self, request: EngineRequest) -> TokenMask | None:
        grammar = request.params.grammar
        if grammar is None:
            return TokenMask.of(request.params, None)
        if self._make_matcher is None:
            raise UnsupportedParameterError("this engine has no grammars", param="response_format")
        try:
            return TokenMask.of(request.params, self._make_matcher(grammar))
        except JaxserveError:
            raise
        except Exception as error:  # whatever a grammar makes its compiler do, it is that request's fault alone
            raise InvalidSchemaError(f"the grammar cannot be used: {error}", param="response_format") from error

    def _resume(self, record: Request) -> None:
        """Take up an output begun before a restart, which may turn out to be complete."""
        output = self.scheduler.end_resumed(record.request_id)
        if output is None:
            output = TokenOutput(request_id=record.request_id, token_ids=record.output_token_ids)
            self._end_by_mask(output)
            output.token_ids = []  # the client has them
        if output.finish_reason is not None:
            self._deliver([output])

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[TokenOutput]:
        """End requests; the last outputs of those that had not ended by themselves."""
        ended = [self.scheduler.abort(request_id, reason) for request_id in request_ids]
        outputs = [output for output in ended if output is not None]
        for output in outputs:
            self._masks.drop(output.request_id)
        return outputs

    # --- the loop

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._outputs or self._previous or self.scheduler.has_work)

    def step(self) -> list[TokenOutput]:
        """Dispatch the next step, then read the one before it; what ended or gained tokens since the last call.

        Only reads where the step in flight is to be read before the next is made: see the file's docstring.
        Raises StepError where the device failed; `recover` then makes the next call possible.
        """
        began = self._clock()
        if self._previous is not None and self._read_first and self.scheduler.expects_online(began):
            self._read_previous()
            return self._take_outputs()
        self._deliver(self.scheduler.expire(began))
        if self._suspects:
            self._suspects.keep(self.scheduler.live_ids)
        output = self.scheduler.schedule(began, self._suspects.on_trial)
        self._scheduler_seconds += self._clock() - began
        handle = self._execute(output) if output is not None else None
        self._host_seconds += self._clock() - began
        ahead = self._previous is not None
        self._read_previous()
        if output is not None and handle is not None:
            if output.masked:
                self._sample(output, handle)
            self._previous = (output, handle)
            self._read_first = ahead or output.num_decode_rows < len(output.rows)
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
        self._suspects.take(outputs)
        self._deliver(outputs)
        spent = self._clock() - began
        self._scheduler_seconds += spent
        self._host_seconds += spent

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        if len(self._masks):
            for output in outputs:
                self._end_by_mask(output)
        self._outputs += outputs

    def _end_by_mask(self, output: TokenOutput) -> None:
        """A grammar that is complete ends its request; so does one that the tokens have left, with an error."""
        reason = self._masks.advance(output)
        if reason is FinishReason.ERROR:
            output.error, output.error_status = self._masks.failure(output.request_id)
            self.scheduler.fail(output.request_id, output.error, output.error_status)
        elif reason is not None:
            self.scheduler.abort(output.request_id, reason)
        output.finish_reason = reason or output.finish_reason
        if output.finish_reason is not None:
            self._masks.drop(output.request_id)

    def _sample(self, output: SchedulerOutput, handle: StepHandle) -> None:
        """Finish a masked step, now that the tokens before it are known."""
        bitmask, failed = self._masks.bitmask(output)
        with _device_work():
            handle.sample(bitmask)
        ended = [self.scheduler.fail(request_id, *self._masks.failure(request_id)) for request_id in failed]
        self._deliver([end for end in ended if end is not None])

    def drain(self) -> list[TokenOutput]:
        """Step until nothing is left to do."""
        outputs: list[TokenOutput] = []
        while self.has_work:
            outputs += self.step()
        return outputs

    @property
    def is_searching(self) -> bool:
        """Whether it is being found out which request makes the device fail."""
        return bool(self._suspects)

    def recover(self) -> bool:
        """After a StepError: a new, empty cache on the device, and whatever was running is computed again.

        Nothing that was delivered changes: prompts and outputs so far are on the host, and a token depends on them
        and on its request's seed only. A request found to be the cause of repeated failures ends with an error.
        Whether one was, and others showed that the device is fine.

        Raises what the runner raises where the device cannot be used any more, and NobodyToBlame.
        """
        self._previous = None
        self.runner.rebuild()
        self._rebuilds += 1
        guilty = self._suspects.failed(self.scheduler.recover())
        if guilty is not None:
            logger.error("request %s ends: the device fails at every step with it and without the others", guilty)
            end = self.scheduler.fail(guilty, "the device fails whenever it computes this request")
            self._deliver([end] if end is not None else [])
        return guilty is not None and self._suspects.has_passed

    # --- administration

    def flush_prefix_cache(self) -> bool:
        """Forget all cached prefixes; pages in use are freed when their requests end."""
        self.scheduler.kv.cache.flush()
        return True

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        counters = stats.counters
        details = {name: float(value) for name, value in dataclasses.asdict(counters).items()}
        return EngineStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_tokens=stats.num_waiting_tokens,
            num_pages_free=stats.num_pages_free,
            num_pages_cached=stats.num_pages_cached,
            num_pages_used=stats.num_pages - stats.num_pages_free - stats.num_pages_evictable,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            computed_prompt_tokens=counters.prefill_tokens,
            cached_tokens=counters.cached_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.retractions + counters.priority_preemptions,
            compiles=self.runner.num_compiles(),
            host_seconds=self._host_seconds,
            details={
                "rebuilds": self._rebuilds,
                "requests_preempted": stats.num_preempted,
                "pages_evictable": stats.num_pages_evictable,
                "window_pages_used": stats.num_window_pages_used,
                "new_token_ratio": stats.new_token_ratio,
                "scheduler_seconds": self._scheduler_seconds,
                **{name: details[name] for name in _DETAILS},
            },
        )


@contextlib.contextmanager
def _device_work() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StepError(f"{type(error).__name__}: {error}") from error


# counters that the named fields of EngineStats do not hold
_DETAILS = (
    "recomputed_tokens",
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
)
