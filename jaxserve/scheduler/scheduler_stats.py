"""The scheduler's statistics: counters since the start, and an immutable snapshot of them with the current gauges."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from jaxserve.types.step import DraftCounters, FinishReason, Request

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens; the same buckets as vLLM's


@dataclass(slots=True)
class Counters:
    """Counters since the start. They only rise."""

    steps: int = 0
    prompt_tokens: int = 0  # prompt tokens of requests, at their first admission
    cached_tokens: int = 0  # those prompt tokens that the prefix cache had
    # prompt tokens whose pages the prefix cache had, and that were computed because no recurrent state was kept there
    stateless_tokens: int = 0
    prefill_tokens: int = 0  # computed in prompt chunks, recomputation included
    recomputed_tokens: int = 0  # computed again after a preemption
    generation_tokens: int = 0  # delivered
    dropped_tokens: int = 0  # sampled after the end of their request was decided
    retractions: int = 0  # requests preempted because pages ran out
    retraction_events: int = 0
    priority_preemptions: int = 0  # requests preempted for a request of better priority
    admissions: int = 0  # first admissions
    queue_seconds: float = 0.0  # summed over first admissions
    first_tokens: int = 0
    first_token_seconds: float = 0.0  # seconds from arrival to the first token on the host, summed
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0
    encode_seconds: float = 0.0  # for which steps waited for the tower
    pages_written: int = 0  # to a file, for another engine
    pages_read: int = 0  # from the file of another engine
    step_tokens: int = 0  # prompt tokens computed plus tokens sampled, summed over the steps
    step_sizes: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))  # number of steps by size

    def count_step(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Count a dispatched step. num_new_tokens: tokens that it samples, in decode rows and at the ends of prompts"""
        self.steps += 1
        self.prefill_tokens += num_prompt_tokens
        num_tokens = num_prompt_tokens + num_new_tokens
        self.step_tokens += num_tokens
        self.step_sizes[bisect_left(STEP_SIZES, num_tokens)] += 1

    def count_admission(self, request: Request, num_left: int) -> None:
        """Count a request that was given a slot, for the first time or again after a preemption.

        num_left: prompt tokens that were not computed before the preemption
        """
        if request.num_preemptions:
            self.recomputed_tokens += max(0, request.num_prefill_tokens - request.num_computed_tokens - num_left)
            return
        assert request.admitted is not None
        self.admissions += 1
        self.queue_seconds += request.admitted - request.arrival
        if request.prefilled is None:
            self.prompt_tokens += request.num_prompt_tokens
            self.cached_tokens += request.num_cached_tokens

    def count_end(self, reason: FinishReason) -> None:
        """Count a request that ended for `reason`."""
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
    """Current gauges and a copy of the counters."""

    num_running: int
    num_waiting: int  # includes preempted requests
    num_preempted: int
    num_waiting_tokens: int  # prompt tokens
    num_pages: int
    num_pages_free: int
    num_pages_cached: int  # in the prefix cache, in use or not
    num_pages_evictable: int  # of these, locked by no request
    num_pages_held: int  # owned by requests
    num_host_pages_used: int  # copies of evicted pages in the memory of the host
    num_host_pages_stored: int  # so far
    num_host_pages_loaded: int  # so far
    group_pages_used: list[int]  # of each layer group from 1 on, without states: neither free nor evictable
    num_state_pages_used: int  # recurrent states that are neither free nor evictable
    num_state_pages_cached: int  # recurrent states in the prefix cache, in use or not
    new_token_ratio: float
    counters: Counters
    drafts: DraftCounters | None  # None: there is no speculation
