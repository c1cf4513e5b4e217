"""One device step as plain data: what the scheduler decides and the device returns; the interface of the runner."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import numpy as np

from jaxserve.types.extras import ExtraParams, StepExtras
from jaxserve.types.sampling import SamplingParams


class RowStatus(enum.IntEnum):
    """Result of one row of a step."""

    FINE = 0
    NOT_FINITE = 1  # NaN or infinity in a hidden state or in the logits
    NOTHING_ALLOWED = 2  # the logits are finite, but the request's parameters exclude every token


@dataclass(frozen=True, slots=True)
class SlotInit:
    """All that the device must know about a request when it takes a slot."""

    slot: int
    params: SamplingParams
    seed: int  # 64 bits
    num_prompt_tokens: int
    # prompt and kept output; penalties need the counts, min_tokens the number of output tokens
    token_ids: list[int]
    eos_token_ids: tuple[int, ...]  # banned until there are min_tokens output tokens; empty with ignore_eos

    @property
    def num_outputs(self) -> int:
        """Number of output tokens that the request has already."""
        return len(self.token_ids) - self.num_prompt_tokens


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step. A Struct, because it is made in 0.13 us; a frozen dataclass takes 1.1 us.

    q tokens        [start, start + num_tokens) of the sequence
    token_ids       those tokens as host literals; empty for a decode row: the slot's last token on the device
    new_page_ids    pages appended to the slot's page table at index first_new_page

    The first row of a request has the SlotInit and brings the pages of the whole prompt. A later row brings no
    pages, or in decode those of the tokens that it produces.

    drafts          of a decode row: guesses of its next tokens. They are computed after the last token, so the row
                    yields the tokens that equal its drafts and one more
    """

    request_id: str
    slot: int
    start: int
    num_tokens: int
    samples: bool  # the last token of the row yields the next token; False: a chunk before the prompt's end
    token_ids: list[int]
    first_new_page: int
    new_page_ids: list[int]
    masked: bool = False  # a token mask from the host applies to this row
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    embed: bool = False  # with samples: return the pooled hidden state instead of a token
    extras: ExtraParams | None = None  # set if extra outputs are requested; then logprobs is not None
    second_text: int = 0  # with embed: the first token of token type 1; 0: none
    drafts: tuple[int, ...] = ()


class PageTableUpdate(msgspec.Struct, frozen=True, gc=False):
    """Entries of a slot's page table from index `first` on."""

    slot: int
    first: int
    page_ids: list[int]


class PageMove(msgspec.Struct, frozen=True, gc=False):
    """A page to copy between the device and the memory of the host, or to forget.

    kind     store: device to host; load: host to device; drop: forget the page in `slot`; clear: forget all pages
    slot     place in the host's memory
    digest   of a page to store: of its prefix, so that another process can find it
    group    of layers, whose page it is: 0, or 1 for those with a sliding window
    """

    kind: Literal["store", "load", "drop", "clear"]
    page_id: int = 0
    slot: int = 0
    digest: bytes = b""
    group: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step for the device: decode rows (one token each, and drafts) first, then prefill chunks.

    Only a step without chunks has drafts. A step without rows only moves pages.
    """

    step: int
    rows: list[ScheduledRow]
    num_decode_rows: int
    slot_inits: list[SlotInit]  # applied before the rows run
    # of the sliding-window layers; entries before the row's window have no meaning
    window_pages: list[PageTableUpdate] = field(default_factory=list)
    num_drafts: int = 0  # of all rows
    page_moves: list[PageMove] = field(default_factory=list)  # made before the rows run, in this order

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without drafts."""
        return self.num_decode_rows + sum(row.num_tokens for row in self.rows[self.num_decode_rows :])

    @property
    def masked(self) -> bool:
        return any(row.masked for row in self.rows)

    @property
    def admitted_ids(self) -> list[str]:
        """Return the ids of the requests that get a slot in this step."""
        slots = {init.slot for init in self.slot_inits}
        return [row.request_id for row in self.rows if row.slot in slots] if slots else []


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The results of a step on the host: R rows as in SchedulerOutput.rows, at most Q tokens per row.

    Entries of rows with samples=False have no meaning, except `status`: it says whether the hidden states of the
    chunk's tokens are finite.
    """

    token_ids: np.ndarray  # int32 [R, Q]
    num_valid: np.ndarray  # int32 [R]
    status: np.ndarray  # uint8 [R], RowStatus values
    logprobs: np.ndarray | None = None  # float32 [R, Q], of the sampled tokens
    ranks: np.ndarray | None = None  # int32 [R, Q]
    top_ids: np.ndarray | None = None  # int32 [R, Q, 20]
    top_logprobs: np.ndarray | None = None  # float32 [R, Q, 20]
    # row index -> (logprobs [n], ranks [n], top ids [n, 20], top logprobs [n, 20]) of the prompt tokens at positions
    # row.start + 1 .. row.start + n: those that the chunk's tokens predict (the last chunk of a prompt: one fewer)
    prompt_logprobs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] | None = None
    embeddings: Mapping[int, np.ndarray] | None = None  # row index -> float32 [D], for rows with embed and samples
    extras: StepExtras | None = None  # set for steps with a row that asks for extra outputs


class StepHandle(Protocol):
    """A step that was dispatched to the device."""

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        """Sample a masked step. bitmask: int32 [R, ceil(V/32)], bit 1 allows the token; rows without a mask are all
        ones. A row with k drafts has 1 + k of these rows, one for each token that it may yield.

        late: rows that yield no token; the next decode row of their slots computes the same token again.
        """
        ...

    def result(self) -> SampledTokens:
        """Block until the step has run and return its tokens."""
        ...


class StepRunner(Protocol):
    """The device side as the engine sees it. Tests replace it by a fake with known results."""

    def execute(self, output: SchedulerOutput) -> StepHandle:
        """Dispatch a step and return at once. If `output.masked`, sampling waits for `StepHandle.sample`."""
        ...

    def rebuild(self) -> None:
        """Discard all steps, slots and pages and allocate new ones, after a device failure. The weights stay."""
        ...

    def num_compiles(self) -> int:
        """Number of XLA compilations since the runner was ready. Normally 0."""
        ...

    def close(self) -> None:
        """Give back files and threads. No step may follow. A second call does nothing."""
        ...
