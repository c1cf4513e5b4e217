"""What the scheduler must know about the model, the device and the configuration: resolved numbers, no "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import ConfigError, ContextLengthError, InvalidValueError
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from jaxserve.types.scheduling.step_times import UNTIMED, StepTimes
from jaxserve.types.scheduling.window_size import WindowSize


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Resolved settings of the scheduler. Raises ConfigError if two numbers contradict each other."""

    num_pages: int
    page_size: int  # tokens
    max_num_seqs: int  # number of slots
    max_num_batched_tokens: int  # per step
    max_model_len: int  # per sequence, prompt plus output
    policy: Literal["fcfs", "lpm", "priority"] = "fcfs"
    prefix_cache: bool = True
    new_token_ratio: float = 0.7
    queue_timeout: float | None = None  # seconds
    prefill_chunk_size: int | None = None  # prompt tokens per step, over all requests; None: the budget
    aging_steps: int = 1024  # steps after which a waiting request may not be passed any more
    max_drafts: int = 0  # drafts of a decode row; 0: no speculation
    verify_sizes: tuple[int, ...] = ()  # tokens of a step with drafts, ascending
    window: int | None = None  # tokens that sliding-window layers see; None: no such layers
    num_window_pages: int = 0  # size of their own page pool
    num_host_pages: int = 0  # copies of evicted pages in the memory of the host
    num_host_window_pages: int = 0  # likewise, of the windowed layers
    page_events: bool = False  # whether the pages that enter and leave the prefix cache are reported
    # tokens, ascending; a step with a prompt is shortened to one of them if that saves padding
    step_sizes: tuple[int, ...] = ()
    batch_policy: Literal["priority", "yield"] = "priority"  # see background.py
    step_times: StepTimes = UNTIMED  # measured on the served model; empty: not measured
    whole_prompts: bool = False  # disable chunked prefill: every token of an encoder sees all others

    def __post_init__(self) -> None:
        if min(self.num_pages, self.page_size, self.max_num_seqs, self.max_model_len) < 1:
            raise ConfigError("num_pages, page_size, max_num_seqs and max_model_len must be at least 1")
        if self.max_num_batched_tokens < 2:
            raise ConfigError("scheduler.max_num_batched_tokens must be at least 2: one to decode and one of a prompt")
        if min(self.aging_steps, self.prefill_chunk_size or 1) < 1:
            raise ConfigError("aging_steps and prefill_chunk_size must be at least 1")
        if self.whole_prompts and self.prefill_budget < self.max_model_len:
            raise ConfigError(f"a step of {self.prefill_budget} tokens is too small for texts of {self.max_model_len}")
        size = self.window_size
        if size is not None and self.num_window_pages < (least := size.least(self.max_sequence_tokens)):
            raise ConfigError(f"{self.num_window_pages} pages for windowed layers are too few: {least} are needed")

    @property
    def window_size(self) -> WindowSize | None:
        if self.window is None:
            return None
        return WindowSize(self.window, self.page_size, self.prefill_budget, 1 + self.max_drafts)

    @property
    def num_slots(self) -> int:
        """Number of requests that run at once. A step with one token of each still has room for a prompt token."""
        return min(self.max_num_seqs, self.max_num_batched_tokens - 1)

    @property
    def max_sequence_tokens(self) -> int:
        """Number of tokens of the longest sequence that can run: the model's context length, or all pages."""
        return min(self.max_model_len, self.num_pages * self.page_size)

    @property
    def prefill_budget(self) -> int:
        return self.prefill_chunk_size or self.max_num_batched_tokens

    def rank(self, priority: int) -> int:
        """Return the effective priority under the policy: the request's own, or only whether it is background work."""
        return priority if self.policy == "priority" else int(priority >= BACKGROUND_PRIORITY)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise ContextLengthError or InvalidValueError for a request that could never run to its end."""
        context, least = self.max_sequence_tokens, min(max_tokens, 1)
        room = context - num_prompt_tokens
        if num_prompt_tokens < 1:
            raise InvalidValueError("the prompt has no tokens", param="prompt")
        if room < least:
            raise ContextLengthError.too_long(num_prompt_tokens, context - least, context=context, param="prompt")
        if max_tokens > room:
            raise ContextLengthError.no_room(num_prompt_tokens, max_tokens, context)
