"""The scheduler's numbers: counters since the start, and a frozen view of them with the gauges of now."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from jaxserve.types.output import FinishReason
from jaxserve.types.request import Request

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens; vLLM's buckets


@dataclass(slots=True)
class Counters:
    """Only ever rise."""

    steps: int = 0
    prompt_tokens: int = 0  # of requests at their first admission
    cached_tokens: int = 0  # of these, found in the prefix cache
    prefill_tokens: int = 0  # computed as prompt chunks, recomputation included
    recomputed_tokens: int = 0  # computed again after a preemption
    generation_tokens: int = 0  # delivered
    dropped_tokens: int = 0  # sampled after the end of their request was decided
    retractions: int = 0  # requests preempted because pages ran out
    retraction_events: int = 0
    priority_preemptions: int = 0  # requests preempted for a better one
    admissions: int = 0  # first admissions
    queue_seconds: float = 0.0  # summed over first admissions
    first_tokens: int = 0
    first_token_seconds: float = 0.0  # arrival to first token on the host, summed
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0
    step_tokens: int = 0  # prompt tokens that were computed and tokens that were made, summed over the steps
    step_sizes: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))  # steps of each size

    def count_step(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """A step is dispatched. num_new_tokens: that it makes, for decode rows and at the ends of prompts."""
        self.steps += 1
        self.prefill_tokens += num_prompt_tokens
        num_tokens = num_prompt_tokens + num_new_tokens
        self.step_tokens += num_tokens
        self.step_sizes[bisect_left(STEP_SIZES, num_tokens)] += 1

    def count_admission(self, request: Request, num_left: int) -> None:
        """A request has been given a slot: for the first time, or again after a preemption.

        num_left: tokens of its prompt that were not computed before the preemption
        """
        if request.num_preemptions:
            self.recomputed_tokens += max(0, request.num_prefill_tokens - request.num_computed_tokens - num_left)
            return
        assert request.admitted is not None
        self.admissions += 1
        self.queue_seconds += request.admitted - request.arrival
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_tokens += request.num_cached_tokens

    def count_end(self, reason: FinishReason) -> None:
        match reason:
            case FinishReason.STOP:
                self.finished_stop += 1
            case FinishReason.LENGTH:
                self.finished_length += 1
            case FinishReason.ABORT:
                self.finished_abort += 1
            case FinishReason.ERROR:
                self.finished_error += 1


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of now, and a copy of the counters."""

    num_running: int
    num_waiting: int  # preempted ones included
    num_preempted: int
    num_waiting_tokens: int  # prompt tokens
    num_pages: int
    num_pages_free: int
    num_pages_cached: int  # in the prefix cache, in use or not
    num_pages_evictable: int  # of these, used by no request
    num_pages_held: int  # owned by requests
    num_window_pages_used: int  # of the layers with a sliding window: neither free nor evictable
    new_token_ratio: float
    counters: Counters
