"""The plain data of a request's life on the engine side. No jax, no tokenizer, no HTTP.

Everything that crosses the socket between the API process and the engine process is a msgspec Struct.
`SchedulerOutput` is what one process decides and every device process executes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np

from jaxserve.engine.mask_budget import MaskBudget

# Requests of this priority or more are background work (batches): under every policy they run after all others and
# give way to them.
BACKGROUND_PRIORITY = 2**30

MAX_LOGIT_BIAS = 4096  # logit_bias entries a request: the room that the device has for each
MAX_WATCHED = 128  # token ids a request may ask the log-probabilities of, likewise

# What fits the device's arrays. Checked where a frame is decoded: one that breaks it is no message.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Real = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]  # NaN and infinity are refused too


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # in the queue, holds no page and no slot
    RUNNING = "running"  # holds a slot and pages
    PREEMPTED = "preempted"  # retracted: back in the queue with its output kept, to be recomputed
    FINISHED = "finished"


class RowStatus(enum.IntEnum):
    """What became of a row of a step."""

    FINE = 0
    NOT_FINITE = 1  # NaN or infinity in a hidden state or in the model's logits
    NOTHING_ALLOWED = 2  # the logits are finite, and the request's parameters exclude every token


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token (or, found by the text side, a stop string)
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"  # this request failed; see TokenOutput.error


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's output must match.

    kind: "json_object" | "json_schema" | "regex" | "lark" (structural tags and tool calls too) | "ebnf" | "choice"
    source: the schema as JSON text, the pattern, the grammar text, the JSON list of choices
    checked: what the grammar compiler made of it, for the engine to use as it is; empty: not checked
    """

    kind: str
    source: str
    checked: str = ""
    # output token ids after whose last occurrence the grammar begins (e.g. </think>); empty: at once
    begin_after: tuple[Int32, ...] = ()
    # with begin_after: the grammar begins at once unless the first output token is this one (e.g. <think>)
    begin_unless: tuple[Int32, ...] = ()


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How long an output may think; then the end of its thinking is written for the model.

    tokens: that the output may have while it thinks
    family: of reasoning, a name of text/reasoning; inside: the prompt leaves the model within its thinking
    tools: names of the request's tools, whose calls end the thinking too
    end_token_ids: tokens of the end, which become a part of the output
    """

    tokens: Count
    family: str
    inside: bool = False
    tools: tuple[str, ...] = ()
    end_token_ids: tuple[Int32, ...]


HiddenStates = Literal["", "last", "all"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request is sampled and when it ends. Values are validated by the caller (`validated()`)."""

    n: Count = 1
    temperature: Real = 1.0  # 0 is greedy
    top_k: Count = 0  # 0: off (the API maps -1 to 0)
    top_p: Real = 1.0
    min_p: Real = 0.0
    repetition_penalty: Real = 1.0  # multiplicative, over prompt and output tokens
    frequency_penalty: Real = 0.0  # additive per occurrence, over output tokens
    presence_penalty: Real = 0.0  # additive once, over output tokens
    logit_bias: dict[Int32, Real] = {}
    allowed_token_ids: tuple[Int32, ...] | None = None
    bad_words_token_ids: tuple[tuple[Int32, ...], ...] = ()
    seed: int | None = None  # None: the engine draws one
    max_tokens: Count | None = 16  # None: the rest of the context
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[Int32, ...] = ()
    logprobs: Count | None = None  # None: off; k: the chosen token's and the top k's (k <= 20)
    prompt_logprobs: Count | None = None
    grammar: GrammarSpec | None = None
    embed: bool = False  # no tokens: the prompt's pooled hidden state
    watermark_key: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None  # of text/watermark.py
    # asked for by few; each needs `logprobs`, 0 at least
    watched_token_ids: tuple[Int32, ...] = ()  # their log-probabilities too, at every position
    support: bool = False  # the candidates that each token was drawn from
    experts: bool = False  # the experts that each token was given to, of a model that has some
    hidden_states: HiddenStates = ""  # of the tokens that each token was drawn after; all: and of the whole prompt
    # read by the text side only
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    visible_token_ids: tuple[Int32, ...] = ()  # special tokens that stay in the text: a parser of the output reads them
    spaces_between_special_tokens: bool = True
    thinking: ThinkingBudget | None = None

    @property
    def detailed(self) -> bool:
        """Whether it asks for more of a token than its log-probabilities: such rows are sampled in a dispatch apart."""
        return bool(self.watched_token_ids or self.support or self.hidden_states or self.experts)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate, as it enters the engine (n > 1 has been expanded: one each, same `group`)."""

    request_id: str  # made by the server and never used again
    client_id: str = ""  # what the client calls the request, for logs: other requests may have the same
    prompt_token_ids: list[Int32]
    params: SamplingParams
    priority: Int32 = 0  # lower runs earlier
    namespace: str = ""  # prefix-cache namespace: adapter and cache salt
    group: str = ""  # siblings of one n > 1 request share it; made by the server, no other request has it
    deadline: Annotated[float, msgspec.Meta(le=1e12)] | None = None  # seconds from arrival; then it ends with an error
    # tokens already delivered to the client before an engine restart; they continue the output, not the prompt
    resumed_token_ids: list[Int32] = []
    is_answered: bool = False  # by an engine that died: what comes once, with the first token, does not come again


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities (natural log, of the model's distribution at temperature 1) of one position."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    watched: list[float] = []  # of the request's watched_token_ids, in their order


class Support(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one token was drawn from, after temperature, masks, top-k, top-p and min-p; likeliest first.

    Log-probabilities are those of the draw: over the candidates they add up to one.
    """

    logprob: float  # of the token
    ids: list[int]
    logprobs: list[float]


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one request gained in one step. The last one of a request carries `finish_reason`."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, before or with the first token
    support: list[Support] | None = None  # aligned with token_ids
    hidden: bytes | None = None  # float32, little endian, [tokens, D]: each token's logits are made of its row
    prompt_hidden: bytes | None = None  # likewise of the prompt's tokens; once
    experts: bytes | None = None  # int32, little endian, [tokens, L, K]: of the token before each
    prompt_experts: bytes | None = None  # likewise of the prompt's tokens; once
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it; it is the last of token_ids
    embedding: bytes | None = None  # float32, little endian; with finish_reason, of a request that asked for it
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queue_seconds: float = 0.0  # arrival to admission; on the first output with a token
    first_token_seconds: float = 0.0  # arrival to the first token on the host; on that output
    num_preemptions: int = 0  # with finish_reason
    error: str | None = None
    error_status: int = 500  # HTTP status to answer with when nothing was streamed yet
    error_param: str | None = None  # the field at fault


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
