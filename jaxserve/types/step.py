"""One device step, its requests and its outputs as plain data, between scheduler, runner and API.

Data that crosses the socket is a msgspec Struct. A Request never leaves the engine process.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from jaxserve.types.extras import ExtraParams, PromptExtras, StepExtras, TokenExtras
from jaxserve.types.picture import Picture
from jaxserve.types.sampling import Prefilled, SamplingParams, Tenant


class RowStatus(enum.IntEnum):
    """Result of one row of a step."""

    FINE = 0
    NOT_FINITE = 1  # NaN or infinity in a hidden state or in the logits
    NOTHING_ALLOWED = 2  # the logits are finite, but the request's parameters exclude every token


@dataclass(frozen=True, slots=True)
class SlotInit:
    """The values that the device needs of a request when it gets a slot."""

    slot: int
    params: SamplingParams
    seed: int  # 64 bits
    num_prompt_tokens: int
    # prompt and kept output; penalties need the counts, min_tokens the number of output tokens
    token_ids: list[int]
    eos_token_ids: tuple[int, ...]  # banned until there are min_tokens output tokens; empty with ignore_eos
    position_delta: int = 0  # see `picture.position_delta`
    adapter: int = -1  # its slot of the devices' adapters; -1: none

    @property
    def num_outputs(self) -> int:
        """Number of output tokens that the request has already."""
        return len(self.token_ids) - self.num_prompt_tokens


class RowPictures(NamedTuple):
    """The pictures of a row's tokens.

    rows        int32 [num_tokens]: the token's row in the pool of rows; -1: it is text
    shifts      int32 [3, num_tokens], see `picture.position_shifts`
    """

    rows: np.ndarray
    shifts: np.ndarray


class EncodePart(NamedTuple):
    """Pieces [first, last) of a tower, to run on some pictures together. Parts of other pictures never come between.

    pictures    to start with, if first is 0
    rows        of the pool for the tokens of all pictures, which get the result when the last piece was run. A number
                beyond the pool: of a picture that nobody needs any more
    request_ids of those that wait for the pictures
    """

    pictures: tuple[Picture, ...]
    first: int
    last: int
    rows: list[int]
    request_ids: tuple[str, ...] = ()


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step. A Struct, because it is made in 0.13 us; a frozen dataclass takes 1.1 us.

    q tokens        [start, start + num_tokens) of the sequence
    token_ids       those tokens as host literals; empty for a decode row: the slot's last token on the device
    new_page_ids    pages appended to the slot's page table at index first_new_page

    drafts          guesses of a decode row's next tokens. They are computed after the last token, so the row yields the
                    tokens that equal its drafts and one more

    The first row of a request has the SlotInit and brings the pages of the whole prompt. A later prompt row brings no
    pages. A decode row brings the pages of the tokens that it produces.
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
    pictures: RowPictures | None = None  # set for the prompt rows of requests with pictures


class TableUpdate(msgspec.Struct, frozen=True, gc=False):
    """Entries of a slot's page table of a layer group from index `first` on. group: 1 or above"""

    slot: int
    group: int
    first: int
    page_ids: list[int]


class PageMove(msgspec.Struct, frozen=True, gc=False):
    """A page to copy between the device and the memory of the host, or to forget.

    kind     store: device to host; load: host to device; drop: forget the page in `slot`; clear: forget all pages
    slot     place in the host's memory
    digest   digest of the prefix of a page to store, so that another process can find it
    group    layer group of the page
    """

    kind: Literal["store", "load", "drop", "clear"]
    page_id: int = 0
    slot: int = 0
    digest: bytes = b""
    group: int = 0


class SchedulerOutput(msgspec.Struct, frozen=True, gc=False):
    """One step for the device: decode rows (one token each, and drafts) first, then prefill chunks.

    Only a step without chunks has drafts. A step without rows only moves pages or encodes pictures. A Struct as its
    rows are: it is made in 0.2 us; a frozen dataclass takes 3.4 us.
    """

    step: int
    rows: list[ScheduledRow]
    num_decode_rows: int
    slot_inits: list[SlotInit]  # applied before the rows run
    # page tables of the layer groups from 1 on; entries before the first page that a row sees have no meaning
    table_updates: list[TableUpdate] = []
    num_drafts: int = 0  # drafts of all rows
    # number of tokens that fit the pages of each row, if the device proposes drafts after the step; []: it does not
    draft_room: list[int] = []
    page_moves: list[PageMove] = []  # made before the rows run, in this order
    encodes: list[EncodePart] = []  # run after the rows, in this order
    adapter_writes: dict[int, str] = {}  # slot of the devices' adapters -> digest, as above
    rests: bool = False  # the draft model does not compute the step's tokens; its K and V of them stay undefined

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without drafts."""
        return self.num_decode_rows + sum(row.num_tokens for row in self.rows[self.num_decode_rows :])

    @property
    def masked(self) -> bool:
        return any(row.masked for row in self.rows)

    @property
    def request_ids(self) -> list[str]:
        """Return the ids of the requests that the step works for: those of its rows and of the pictures it encodes."""
        ids = [row.request_id for row in self.rows]
        of_pictures = (name for part in self.encodes for name in part.request_ids)
        return list(dict.fromkeys((*ids, *of_pictures))) if self.encodes else ids

    @property
    def admitted_ids(self) -> list[str]:
        """Return the ids of the requests that get a slot in this step."""
        slots = {init.slot for init in self.slot_inits}
        return [row.request_id for row in self.rows if row.slot in slots] if slots else []


class SampledTokens(msgspec.Struct, frozen=True, gc=False):
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
    # row.start + 1 .. row.start + n, which the chunk's tokens predict (one fewer in the last chunk of a prompt)
    prompt_logprobs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] | None = None
    embeddings: Mapping[int, np.ndarray] | None = None  # row index -> float32 [D], for rows with embed and samples
    extras: StepExtras | None = None  # set for steps with a row that asks for extra outputs
    drafts: np.ndarray | None = None  # int32 [R, K], guesses of the tokens after each row's last one; -1: no guess
    encode_seconds: float = 0.0  # that the blocks of the tower took behind the rows


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
        """Close files and end threads. No step may follow. A second call does nothing."""
        ...


class DraftCounters(msgspec.Struct, array_like=True):
    """Counts drafts and how many of them were right.

    num_drafts: rows with drafts that were read. accepted_per_pos: drafts that became output, by their position
    num_rest_steps: steps that a draft model did not compute, because no draft would have been worth it
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_pos: list[int] = []
    num_rest_steps: int = 0

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count a row with `num_drafts` drafts, of which the first `num_accepted` became output."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.accepted_per_pos += [0] * (num_drafts - len(self.accepted_per_pos))
        for place in range(num_accepted):
            self.accepted_per_pos[place] += 1

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_pos)


QUICK = 0.001  # seconds per mask; a request with slower masks has them computed in a thread
NUM_QUICK = 32  # quick masks in a row, over all choices, after which the engine loop computes the masks again


class MaskBudget:
    """CPU time budget of the token masks of all choices of a request. Thread-safe.

    An exhausted budget ends the request.

    A mask of a JSON schema takes 10 to 100 us. The most ambiguous grammar within the parser's limits takes 20 to 30
    ms per mask. At 1 ms per mask the budget is never exhausted, at 30 ms it ends the request after about 100 tokens.

    is_slow: one of the last masks took longer than QUICK
    """

    SECONDS = 2.0
    SECONDS_PER_TOKEN = 0.002  # added to the budget for each output token

    def __init__(self) -> None:
        self.is_slow = False
        self._left = self.SECONDS
        self._num_quick = 0
        self._lock = threading.Lock()

    def charge(self, seconds: float, num_tokens: int = 0) -> None:
        """Subtract CPU seconds that were spent, and add the seconds that new output tokens earn."""
        with self._lock:
            self._left += num_tokens * self.SECONDS_PER_TOKEN - seconds
            self._num_quick = 0 if seconds > QUICK else self._num_quick + 1
            self.is_slow = seconds > QUICK or (self.is_slow and self._num_quick < NUM_QUICK)

    @property
    def error(self) -> str | None:
        """Return why the request must end; None while budget is left."""
        if self._left >= 0:
            return None
        return f"its masks took more than {self.SECONDS:g} s and {self.SECONDS_PER_TOKEN * 1000:g} ms a token"


FIRST_VERSION = "default"  # label of the weights that the engine started with, as in SGLang


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token, or a stop string (found by the API process)
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"  # the client disconnected or aborted the request
    ERROR = "error"  # the request failed; see TokenOutput.error


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities (natural logarithm, at temperature 1) of one position."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    watched: list[float] = []  # log-probabilities of the request's logprob_token_ids, in their order


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The output of one request in one step. The last output of a request has a `finish_reason`."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # sent once, before or with the first token
    extras: TokenExtras | None = None  # if the request asks for some
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token; it is also the last of token_ids
    embedding: bytes | None = None  # float32 [D], little-endian; set with finish_reason if the request asked for it
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    queue_seconds: float = 0.0  # arrival to admission; set on the first output with a token
    first_token_seconds: float = 0.0  # arrival to the first token on the host; set on that output
    num_preemptions: int = 0  # set with finish_reason
    num_accepted_drafts: int = 0  # drafts among token_ids
    num_rejected_drafts: int = 0  # drafts that were computed and are not in token_ids
    weight_versions: tuple[str, ...] = ()  # labels of the weights that made it, if `is_made`; empty: FIRST_VERSION
    weights: int = 0  # number of the update that brought these weights, see ServingState; 0: the weights of the start
    error: str | None = None
    error_status: int = 500  # HTTP status of the answer if nothing was streamed yet
    error_param: str | None = None  # the request field that caused the error

    @property
    def is_made(self) -> bool:
        """Whether the model computed a part of it: tokens, an embedding, or a prompt of which no token is kept."""
        return bool(self.token_ids or self.embedding or self.first_token_seconds)


def joined_versions(*groups: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of several groups, each once, in order."""
    return tuple(dict.fromkeys(label for group in groups for label in group))


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
    adapter: str = ""  # digest; empty: none
    group: str = ""
    client_id: str = ""
    is_answered: bool = False  # an earlier engine process sent its first output already
    deadline: float | None = None  # absolute, time.monotonic() seconds
    stop_token_ids: frozenset[int] = frozenset()  # resolved: stop tokens of params, and end of sequence unless ignored
    hold_seconds: float = 0.0  # how long its pages stay in the cache after its end, for another engine
    prefilled: Prefilled | None = None  # by another engine, which has counted the prompt
    pictures: tuple[Picture, ...] = ()  # of the prompt, in its order
    picture_keys: list[int] | None = None  # the prompt as the prefix cache knows it, if it has pictures
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
    adapter_slot: int = -1  # of its adapter on the devices
    waited_for_adapter: bool = False
    page_ids: list[int] = field(default_factory=list)
    page_capacity: int = 0  # number of tokens that fit its pages
    duplicate_page_ids: list[int] = field(default_factory=list)  # subset of page_ids: the cache has a copy of its own
    shared_with: tuple[str, int] | None = None  # id of another request, and the number of pages that both prompts share
    cache_node: Any = None  # RadixCache's handle of the locked prefix
    # the last match, of pages alone: deeper than cache_node if no recurrent state was kept there; None: no state layers
    matched_node: Any = None
    holdings: dict[int, Any] = field(default_factory=dict)  # by layer group from 1 on: that group's record of it
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0  # sampled on the device, not read by the host yet
    last_step: int = 0  # number of the last step that contains a row of it
    num_prefill_tokens: int = 0  # tokens to prefill since the last admission; then decode begins
    num_read_tokens: int = 0  # of these, the leading ones that were read and are finite, so their pages may be shared
    prompt_done: bool = False  # a finite token was read since the last admission, so the pages of the prompt are valid
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # collected so far; None: not requested, or sent
    prompt_extras: PromptExtras | None = None  # as above
    extras: ExtraParams | None = None  # params.extras if they ask for extra outputs
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
    def prompt_keys(self) -> list[int]:
        """The prompt as the prefix cache knows it: with pictures, see `page_keys.with_pictures`."""
        return self.prompt_token_ids if self.picture_keys is None else self.picture_keys

    def page_tokens(self, start: int, end: int) -> list[int]:
        """Return a new list of the tokens at positions [start, end) as the prefix cache knows them."""
        keys = self.picture_keys
        if keys is None or start >= len(keys):
            return self.token_ids(start, end)
        return keys[start:end] + self.token_ids(len(keys), max(end, len(keys)))

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
