"""One step of the device as plain data: what the scheduler decides, what comes back, and who executes it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from jaxserve.types.sampling import SamplingParams


class RowStatus(enum.IntEnum):
    """What became of a row of a step."""

    FINE = 0
    NOT_FINITE = 1  # NaN or infinity in a hidden state or in the model's logits
    NOTHING_ALLOWED = 2  # the logits are finite, and the request's parameters exclude every token


@dataclass(frozen=True, slots=True)
class SlotInit:
    """Everything the device must know of a request when it takes a slot."""

    slot: int
    params: SamplingParams
    seed: int  # 64 bits
    num_prompt_tokens: int
    # prompt and kept output; penalties need their counts, min_tokens the number of outputs
    token_ids: list[int]
    eos_token_ids: tuple[int, ...]  # banned until min_tokens outputs exist; empty with ignore_eos


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step. (A Struct: made in 0.13 us, where a frozen dataclass takes 1.1.)

    q tokens        [start, start + num_tokens) of the sequence
    token_ids       those tokens as host literals; empty for a decode row: the device's last token of the slot
    new_page_ids    pages appended to the slot's page table at index first_new_page

    A request's first row, the one with a SlotInit, brings the pages of its whole prompt; a later row brings none
    or, in decode, those of the tokens that it produces: one page at most where a step yields one token a row.
    With more tokens a row and step than one, `start` of a decode row is an upper bound: the device's position holds.
    """

    request_id: str
    slot: int
    start: int
    num_tokens: int
    samples: bool  # the row's last token yields the next token (False: a chunk before the prompt's end)
    token_ids: list[int]
    first_new_page: int
    new_page_ids: list[int]
    masked: bool = False  # a host-computed token bitmask applies to this row's sample
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    embed: bool = False  # with samples: the row yields the pooled hidden state instead of a token
    detail: SamplingParams | None = None  # where more is asked for; then logprobs is not None


class PageTableUpdate(msgspec.Struct, frozen=True, gc=False):
    """Entries of a slot's page table from index `first` on."""

    slot: int
    first: int
    page_ids: list[int]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step for the device: decode rows (one token each) first, then prefill chunks."""

    step: int
    rows: list[ScheduledRow]
    num_decode_rows: int
    slot_inits: list[SlotInit]  # applied before the rows run
    # of the layers with a sliding window, at most one a row; what a table holds before the row's window has no meaning
    window_pages: list[PageTableUpdate] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + sum(row.num_tokens for row in self.rows[self.num_decode_rows :])

    @property
    def masked(self) -> bool:
        return any(row.masked for row in self.rows)


@dataclass(frozen=True, slots=True)
class Details:
    """Of R rows, what those with a `detail` ask for. K = min(256, V) candidates a token at most."""

    watched: np.ndarray  # float32 [R, MAX_WATCHED]
    support_logprobs: np.ndarray  # float32 [R], of the token among its candidates
    support_counts: np.ndarray  # int32 [R], may be over K
    support_ids: np.ndarray  # int32 [R, K], likeliest first
    support_top: np.ndarray  # float32 [R, K], their log-probabilities


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the device returned for a step, on the host. R rows as in SchedulerOutput.rows, Q tokens at most a row.

    Entries of rows with samples=False have no meaning, but for their `status`: of a chunk it says whether the hidden
    states of its tokens are finite.
    """

    token_ids: np.ndarray  # int32 [R, Q]
    num_valid: np.ndarray  # int32 [R]
    status: np.ndarray  # uint8 [R], a RowStatus each
    logprobs: np.ndarray | None = None  # float32 [R, Q] of the chosen tokens
    ranks: np.ndarray | None = None  # int32 [R, Q]
    top_ids: np.ndarray | None = None  # int32 [R, Q, 20]
    top_logprobs: np.ndarray | None = None  # float32 [R, Q, 20]
    # row index -> (logprobs [n], ranks [n], top ids [n, 20], top logprobs [n, 20]) of the prompt tokens at positions
    # row.start + 1 .. row.start + n: those that the chunk's tokens predict (the last chunk of a prompt: one fewer)
    prompt_logprobs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] | None = None
    embeddings: Mapping[int, np.ndarray] | None = None  # row index -> float32 [D], of the rows with embed and samples
    details: Details | None = None  # of steps that sample a row with a detail
    prompt_watched: dict[int, np.ndarray] | None = None  # row index -> float32 [n, MAX_WATCHED], as prompt_logprobs
    hidden: Mapping[int, np.ndarray] | None = None  # row index -> float32 [n, D]: of all its tokens, or of the last
    experts: Mapping[int, np.ndarray] | None = None  # row index -> int32 [n, L, K] of all its tokens


class StepHandle(Protocol):
    """A step that was dispatched to the device."""

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        """Finish a masked step. bitmask: int32 [R, ceil(V/32)], bit 1 allows; all ones for free rows.

        late: rows that get no token; the next decode row of their slots computes the same token again.
        """
        ...

    def result(self) -> SampledTokens:
        """Block until the step has run and return its tokens."""
        ...


class Runner(Protocol):
    """The device side as the engine sees it; tests replace it by a fake whose answers are known."""

    def execute(self, output: SchedulerOutput) -> StepHandle:
        """Dispatch a step and return at once. With `output.masked`, sampling waits for `StepHandle.sample`."""
        ...

    def rebuild(self) -> None:
        """Forget every step, slot and page and start with empty ones; the weights stay. For use after a failure."""
        ...

    def num_compiles(self) -> int:
        """Compilations since the runner was ready: 0 while all is well."""
        ...
