"""The engine's record of one sequence. It never leaves the engine process."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from jaxserve.types.extras import ExtraParams, PromptExtras
from jaxserve.types.mask_budget import MaskBudget
from jaxserve.types.output import FinishReason, TokenLogprobs
from jaxserve.types.sampling import Prefilled, SamplingParams, Tenant


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # in the queue; holds no page and no slot
    RUNNING = "running"  # holds a slot and pages
    PREEMPTED = "preempted"  # back in the queue with its output kept; its KV is computed again
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one sequence. The scheduler, its queue and step builder, and the KVManager change it.

    tokens          [0, num_prompt) prompt   [num_prompt, num_tokens) output   then num_inflight_tokens not yet read
    computed        [0, num_computed_tokens) have their K and V in pages, counting steps in flight
    pages           page_ids[i] holds positions [i * page_size, (i + 1) * page_size)
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float  # time.monotonic() seconds
    seed: int
    max_tokens: int  # resolved: never None, at most the rest of the context
    priority: int = 0
    tenant: Tenant | None = None  # None: the default one
    namespace: str = ""
    group: str = ""
    client_id: str = ""
    is_answered: bool = False  # an earlier engine process sent its first output already
    deadline: float | None = None  # absolute, time.monotonic() seconds
    stop_token_ids: frozenset[int] = frozenset()  # resolved: those of params, plus end of sequence unless ignored
    hold_seconds: float = 0.0  # how long its pages stay in the cache after its end, for another engine
    prefilled: Prefilled | None = None  # by another engine, which has counted the prompt
    max_computed_tokens: int = 0  # resolved: the last token needs no K and V
    masked: bool = False  # sampling needs a token mask from the host
    mask_budget: MaskBudget | None = None  # shared with its siblings
    is_paused: bool = False  # paused until `Scheduler.resume`, while a thread computes its token mask
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    # the queue
    queued_step: int = 0  # scheduler step in which it was queued first
    aged: bool = False  # starved: no other request may pass or preempt it
    admitted: float | None = None  # time.monotonic() of the first admission
    first_token: float | None = None  # time.monotonic() when the first token was read
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission, in the first engine
    num_preemptions: int = 0
    num_loaded_ahead: int = 0  # pages of its prefix that were cached after the last KVManager.load_ahead

    # held while it runs, and after its end until the last step that contains it has been read
    slot: int | None = None
    page_ids: list[int] = field(default_factory=list)
    page_capacity: int = 0  # number of tokens that fit its pages
    duplicate_page_ids: list[int] = field(default_factory=list)  # subset of page_ids: the cache has a copy of its own
    shared_with: tuple[str, int] | None = None  # id of another request, and the number of pages that both prompts share
    cache_node: Any = None  # RadixCache's handle of the locked prefix
    window: Any = None  # WindowGroup's record of the sliding-window pages
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0  # sampled on the device, not read by the host yet
    last_step: int = 0  # number of the last step that contains a row of it
    num_prefill_tokens: int = 0  # tokens to prefill since the last admission; then decode begins
    num_read_tokens: int = 0  # of these, the leading ones that were read and are finite, so their pages may be shared
    prompt_done: bool = False  # a finite token was read since the last admission, so the pages of the prompt are valid
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # collected so far; None: not requested, or sent
    prompt_extras: PromptExtras | None = None  # as above
    extras: ExtraParams | None = None  # those of params if they ask for extra outputs
    speculation: Any = None  # Speculation's record of its drafts

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether an output of every prompt token was requested, so that none may come from the prefix cache."""
        return self.prompt_logprobs is not None or self.prompt_extras is not None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens known to the host: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return a new list of the tokens at positions [start, end)."""
        prompt = self.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + self.output_token_ids[max(0, start - len(prompt)) : end - len(prompt)]

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
