"""The engine's own record of one sequence. It never leaves the engine process."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.types.mask_budget import MaskBudget
from jaxserve.types.output import FinishReason, TokenLogprobs
from jaxserve.types.sampling import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # in the queue, holds no page and no slot
    RUNNING = "running"  # holds a slot and pages
    PREEMPTED = "preempted"  # retracted: back in the queue with its output kept, to be recomputed
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one sequence. Only the Scheduler and its KVManager change it.

    tokens          [0, num_prompt) prompt   [num_prompt, num_tokens) output   then num_inflight_tokens not yet read
    computed        [0, num_computed_tokens) have their K and V in pages, counting steps in flight
    pages           page_ids[i] holds positions [i * page_size, (i + 1) * page_size)
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float  # time.monotonic() seconds
    seed: int
    max_tokens: int  # resolved: never None, clamped to the context
    priority: int = 0
    namespace: str = ""
    group: str = ""
    client_id: str = ""
    is_answered: bool = False  # by an engine before this one
    deadline: float | None = None  # absolute, time.monotonic()
    stop_token_ids: frozenset[int] = frozenset()  # resolved: those of params, and end of sequence unless ignored
    max_computed_tokens: int = 0  # resolved by the scheduler: all but the last token need their K and V
    masked: bool = False  # its samples need a bitmask computed on the host
    mask_budget: MaskBudget | None = None  # shared with its siblings
    rests: bool = False  # no decode row until `Scheduler.wake`: a thread makes its mask
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    # the queue
    queued_step: int = 0  # scheduler step at which it first queued
    aged: bool = False  # has waited so long that nobody may pass it or preempt it
    admitted: float | None = None  # time.monotonic() of the first admission
    first_token: float | None = None  # time.monotonic() at which the first token was read
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int = 0

    # held while it runs, and after its end until its last step has been read
    slot: int | None = None
    page_ids: list[int] = field(default_factory=list)
    page_capacity: int = 0  # tokens that fit its pages
    duplicate_page_ids: list[int] = field(default_factory=list)  # of page_ids: the cache has its own copy
    shared_with: tuple[str, int] | None = None  # id of another request, and how many pages both prompts begin with
    cache_node: Any = None  # RadixCache's handle of the locked prefix; opaque here
    window: Any = None  # WindowGroup's record of the pages of layers with a window; opaque here
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0  # sampled on the device, not yet read by the host
    last_step: int = 0  # the last step that has a row of it
    num_prefill_tokens: int = 0  # host literals to compute since the last admission; then decode begins
    num_read_tokens: int = 0  # of these, from the first on: read and finite, so their pages may be shared
    prompt_done: bool = False  # since the last admission a good token was read: its pages hold no garbage
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # gathered so far; None: not asked or delivered
    prompt_hidden: dict[int, np.ndarray] | None = None  # likewise: first position -> float32 [n, D]
    prompt_experts: dict[int, np.ndarray] | None = None  # likewise: first position -> int32 [n, L, K]
    detail: SamplingParams | None = None  # params, where they are detailed

    @property
    def reads_whole_prompt(self) -> bool:
        """Something is asked of every prompt token, so that none may be taken from the prefix cache."""
        gathered = self.prompt_logprobs, self.prompt_hidden, self.prompt_experts
        return any(each is not None for each in gathered)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """A fresh list of the tokens at positions [start, end)."""
        prompt = self.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + self.output_token_ids[max(0, start - len(prompt)) : end - len(prompt)]

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
