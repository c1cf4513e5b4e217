"""The scheduler's view of the model, the device and the configuration: resolved numbers, no "auto".

Also the measured durations of steps, and how many pages the layers need that do not see all tokens. The page at
index i holds the positions [i * page_size, (i + 1) * page_size), as everywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jaxserve.errors import ConfigError, ContextLengthError, InvalidValueError
from jaxserve.types.sampling import BACKGROUND_PRIORITY

NEARLY = 0.9  # share of the highest throughput that counts as nearly all of it


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per step of the programs that were timed. Both tables may be empty.

    decode     decode rows -> seconds
    prefill    tokens of a step with a prompt -> seconds
    verify     tokens of a step with drafts -> seconds
    draft      rows that the device proposes drafts for -> seconds
    """

    decode: Mapping[int, float]
    prefill: Mapping[int, float]
    verify: Mapping[int, float] = field(default_factory=dict)
    draft: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        decode: Mapping[int, float],
        prefill: Mapping[int, float],
        verify: Mapping[int, float] | None = None,
        draft: Mapping[int, float] | None = None,
    ) -> StepTimes:
        """Build the tables from one measurement per size. Removes noise: no size takes longer than a larger one."""
        return cls(_rising(decode), _rising(prefill), _rising(verify or {}), _rising(draft or {}))

    def like(self, full: StepTimes) -> StepTimes:
        """Return these times with prefill as slow as in `full`, which has the largest size of the same programs.

        These steps had no rows, so no attention, which takes a part of a prefill and hardly any of a decode step.
        """
        largest = max(self.prefill, default=0)
        if not self.prefill.get(largest) or largest not in full.prefill:
            return self
        factor = max(1.0, full.prefill[largest] / self.prefill[largest])
        return replace(self, prefill={size: factor * taken for size, taken in self.prefill.items()})

    def decode_seconds(self, rows: int) -> float:
        """Return the seconds of a step with `rows` decode rows; 0 if nothing was timed."""
        return _seconds(self.decode or self.prefill, rows)

    def verify_seconds(self, tokens: int) -> float:
        """Return the seconds of a step with drafts of `tokens` tokens; 0 if nothing was timed."""
        return _seconds(self.verify, tokens)

    def draft_seconds(self, rows: int) -> float:
        """Return the seconds in which the device proposes drafts for `rows` rows; 0 if nothing was timed."""
        return _seconds(self.draft, rows)

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds of the steps that compute `tokens` prompt tokens; 0 if nothing was timed."""
        return _seconds(self.prefill, tokens)

    def full_rows(self, most: int) -> int:
        """Return the fewest decode rows whose throughput is at least NEARLY times the best of up to `most` rows.

        Returns `most` if no decode step of up to `most` rows was timed.
        """
        speeds = {rows: rows / seconds for rows, seconds in self.decode.items() if seconds > 0 and rows <= most}
        return min((rows for rows in speeds if speeds[rows] >= NEARLY * max(speeds.values())), default=most)

    def tokens_within(self, seconds: float) -> int | None:
        """Return the most tokens of a step with a prompt that finishes within the given seconds.

        Returns at least the smallest size; None if nothing was timed.
        """
        if not self.prefill:
            return None
        largest = max(self.prefill)
        if seconds > self.prefill[largest] > 0:
            return int(largest * seconds / self.prefill[largest])
        return max((size for size, taken in self.prefill.items() if taken <= seconds), default=min(self.prefill))


def _rising(table: Mapping[int, float]) -> dict[int, float]:
    return {size: min(taken for other, taken in table.items() if other >= size) for size in sorted(table)}


UNTIMED = StepTimes({}, {})


def _seconds(table: Mapping[int, float], count: int) -> float:
    """Return the seconds of the smallest size that holds `count`; proportionally more beyond the largest size."""
    if not table:
        return 0.0
    largest = max(table)
    if count > largest:
        return table[largest] * count / largest
    return table[min(size for size in table if size >= count)]


class Reach(NamedTuple):
    """Which tokens before it a token sees, in layers that do not see all.

    window  the last `tokens` tokens, itself included: [p - tokens + 1, p]
    chunk   the tokens of its chunk up to itself: [p - p % tokens, p]
    """

    kind: Literal["window", "chunk"]
    tokens: int


@dataclass(frozen=True, slots=True)
class Span:
    """Computes with the sizes of a reach, a page and a step.

    prompt_tokens: maximum number of prompt tokens per step. tokens_per_step: maximum number of tokens of a decode row,
    drafts included
    """

    reach: Reach
    page_size: int
    prompt_tokens: int
    tokens_per_step: int = 1

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at `position` sees."""
        kind, tokens = self.reach
        return position - position % tokens if kind == "chunk" else max(0, position - tokens + 1)

    def first_of_prefix(self, num_pages: int) -> int:
        """Return the index of the first page that the token after a prefix of `num_pages` pages sees."""
        return self.first_seen(num_pages * self.page_size) // self.page_size

    def first_needed(self, position: int) -> int:
        """Return the index of the first page to keep for tokens from `position` on.

        It is the first page that these tokens see, or that an equal request sees which starts at the last page boundary
        before `position`. So the computed pages stay usable as a prefix until the next boundary.
        """
        return self.first_of_prefix((position - 1) // self.page_size)

    def next_release(self, position: int) -> int:
        """Return the next position at which `first_needed` can change."""
        return ((position - 1) // self.page_size + 1) * self.page_size + 1

    # A chunk of n tokens never needs more pages than a window of n tokens, so the sizes below are a window's.

    @property
    def decoding(self) -> int:
        """Maximum number of pages of a decoding request, with one step in flight and the next one."""
        return self._touched(2 * self.tokens_per_step)

    @property
    def prefilling(self) -> int:
        """Maximum number of pages of a request in prefill, with the tokens of one step in flight and the next one."""
        return self._touched(2 * max(self.prompt_tokens, self.tokens_per_step))

    def most(self, longest: int) -> int:
        """Return the maximum number of pages of a decoding request of at most `longest` tokens."""
        return min(self.decoding, -(-longest // self.page_size))

    def for_requests(self, count: int) -> int:
        """Return how many pages the pool needs for `count` requests.

        These are the pages that they can hold at once, the prompts of two steps included, plus as many for cached
        prefixes that no request uses.
        """
        return 2 * count * self.decoding + 2 * -(-self.prompt_tokens // self.page_size)

    def least(self, longest: int) -> int:
        """Return the fewest pages with which a sequence of `longest` tokens can run alone, with any cached prefix."""
        return min(2 * self.decoding, -(-longest // self.page_size))

    def _touched(self, new: int) -> int:
        """Return the maximum number of pages that `new` tokens, the window and up to a page before it can touch."""
        return (self.reach.tokens + new - 3) // self.page_size + 3


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The page pool of the layers of one reach.

    num_host_pages: copies of evicted pages in the memory of the host
    """

    reach: Reach
    num_pages: int
    num_host_pages: int = 0


STATE_EMITS = 4  # states that a step may keep for the prefix cache, of each row
# A slot's entries for its recurrent state. The head: page to read, page to write, number of tokens in the state that is
# read. Then (position, page) of each state to keep.
STATE_HEAD = 3
STATE_COLUMNS = STATE_HEAD + 2 * STATE_EMITS


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The pool of recurrent states. A page is the state of all layers that have one, after some number of tokens.

    interval: tokens between two states that are kept for the prefix cache. border: tokens; states are kept at multiples
    of it. The page size divides it, and it divides the interval.
    """

    num_pages: int
    interval: int
    border: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerLimits:
    """How the pictures of a model are encoded.

    num_rows      rows of the pool, each of one token
    merge         patches of a token are merge x merge
    pieces        patches of the programs, ascending -> names of those that encode pictures of as many, in their order
    packs         whether pictures share a program if they fit. If not, the bits of a row depend on its picture alone
    seconds       name and patches of a program -> measured seconds. Empty: not measured, a step then runs one piece
    step_seconds  for which the pieces of a step may run; running streams wait for them. A step has at least one
    """

    num_rows: int
    merge: int
    pieces: Mapping[int, tuple[str, ...]]
    packs: bool = True
    seconds: Mapping[tuple[str, int], float] = field(default_factory=dict)
    step_seconds: float = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Patches of the programs, ascending."""
        return tuple(self.pieces)

    def size_of(self, num_patches: int) -> int:
        """Return the patches of the smallest program that holds as many."""
        return self.sizes[bisect_left(self.sizes, num_patches)]


@dataclass(frozen=True)
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
    draft_rows: int = 0  # most rows that the device proposes drafts for; 0: it proposes none
    num_host_pages: int = 0  # copies of evicted pages in the memory of the host
    groups: tuple[GroupSizes, ...] = ()  # of the layers that do not see all tokens, each with page tables of its own
    states: StateSizes | None = None  # of the layers with a recurrent state; None: there are none
    page_events: bool = False  # whether the pages that enter and leave the prefix cache are reported
    # tokens, ascending; a step with a prompt is shortened to one of them if that saves padding
    step_sizes: tuple[int, ...] = ()
    batch_policy: Literal["priority", "yield"] = "priority"  # see background.py
    step_times: StepTimes = UNTIMED  # measured on the served model; empty: not measured
    num_adapter_slots: int = 0  # adapters on the devices at once
    whole_prompts: bool = False  # disable chunked prefill: every token of an encoder sees all others
    pictures: TowerLimits | None = None  # None: the model takes no pictures

    def __post_init__(self) -> None:
        if min(self.num_pages, self.page_size, self.max_num_seqs, self.max_model_len) < 1:
            raise ConfigError("num_pages, page_size, max_num_seqs and max_model_len must be at least 1")
        if self.max_num_batched_tokens < 2:
            raise ConfigError("scheduler.max_num_batched_tokens must be at least 2: one to decode and one of a prompt")
        if min(self.aging_steps, self.prefill_chunk_size or 1) < 1:
            raise ConfigError("aging_steps and prefill_chunk_size must be at least 1")
        if self.whole_prompts and self.prefill_budget < self.max_model_len:
            raise ConfigError(
                f"a step of {self.prefill_budget} tokens is too small for texts of {self.max_model_len}",
                fix="leave scheduler.prefill_chunk_size out, or raise scheduler.max_num_batched_tokens",
            )
        for group, span in zip(self.groups, self.spans, strict=True):
            if group.num_pages < (least := span.least(self.max_sequence_tokens)):
                raise ConfigError(
                    f"{group.num_pages} pages for layers with a {group.reach.kind} of {group.reach.tokens} tokens are "
                    f"too few: {least} are needed"
                )

        if self.states is not None:
            self._check_states(self.states)

    def _check_states(self, states: StateSizes) -> None:
        if states.num_pages < 2:
            raise ConfigError(f"cache.num_state_pages is {states.num_pages}, and 2 are needed: one cached, one in use")
        if states.border % self.page_size or states.interval % states.border:
            raise ConfigError(
                f"{states.interval} tokens between states must be a multiple of {states.border}, which must be one of "
                f"the {self.page_size} tokens of a page"
            )
        if self.num_host_pages:
            raise ConfigError("recurrent states do not work with copies in the memory of the host")

    @property
    def spans(self) -> tuple[Span, ...]:
        """The span of each of `groups`."""
        sizes = self.page_size, self.prefill_budget, 1 + self.max_drafts
        return tuple(Span(group.reach, *sizes) for group in self.groups)

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
