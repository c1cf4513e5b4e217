"""The plain data of the store: files, batches and the legal transitions of their states, responses, conversations.

No SQL, no HTTP, no JSON: both the store and api/ read this. Times are whole Unix seconds. An item or object of the API
is kept as its JSON bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MIN_EXPIRY_SECONDS = 3600
MAX_EXPIRY_SECONDS = 30 * 24 * 3600


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A stored file. `bytes` is its size."""

    id: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    owner: str = ""  # the name of the API key that made it; "": the default key


class BatchStatus(enum.StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})

# Cancelling is possible until the output is published. A cancel during `finalizing` wins if it commits first.
EDGES: dict[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset({BatchStatus.FAILED, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING}),
    BatchStatus.IN_PROGRESS: frozenset(
        {BatchStatus.FINALIZING, BatchStatus.EXPIRED, BatchStatus.CANCELLING, BatchStatus.FAILED}
    ),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.CANCELLING}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
} | {status: frozenset() for status in TERMINAL}


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a batch failed. `line` is the 1-based line of the input file; None if the error concerns no single line."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of successful batch requests."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class NewBatch:
    """The validated fields of a request to create a batch."""

    endpoint: str
    input_file_id: str
    completion_window: str
    window_seconds: int
    metadata: dict[str, str] | None = None
    output_expires_seconds: int | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. Each `*_at` is set once, by the transition into the state of that name."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    model: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: TokenCounts = TokenCounts()
    errors: tuple[BatchError, ...] = ()
    metadata: dict[str, str] | None = None
    output_expires_seconds: int | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of one batch request. `payload` is its line of the output or error file, without the newline."""

    line: int
    succeeded: bool
    payload: bytes
    usage: TokenCounts = field(default_factory=TokenCounts)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which part of a list to return: up to `limit` objects after the object with the id `after`.

    owner: the API key that asks, which sees only its own objects; None: see all
    """

    limit: int
    after: str | None = None
    ascending: bool = False
    owner: str | None = None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list, in the requested order."""

    items: list[T]
    has_more: bool


RESPONSE_SECONDS = 30 * 24 * 3600  # as at OpenAI
EVENT_SECONDS = 3600  # the events of a background response are kept so long after its end
MAX_TURNS = 1000  # responses in a chain
MAX_HISTORY_BYTES = 32 * 2**20  # bytes of the items of a chain or a conversation
MAX_QUEUED = 10_000  # background responses that wait or run


class ResponseStatus(enum.StrEnum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"

    @property
    def ended(self) -> bool:
        return self not in (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item of a response or a conversation. body: its JSON with the id"""

    id: str
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body)


@dataclass(frozen=True, slots=True)
class History:
    """The items before the input of a response. turns: number of responses in it. bytes: size of its items"""

    items: tuple[StoredItem, ...] = ()
    turns: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response to store.

    input: only its own items. history: the items before them, if it continues a response
    body: the Response object without its output
    request: the body of the request of a background response
    logged: its events are kept
    """

    id: str
    status: ResponseStatus
    body: bytes
    input: tuple[StoredItem, ...]
    owner: str = ""
    previous_id: str | None = None
    conversation_id: str | None = None
    history: History = History()
    request: bytes | None = None
    logged: bool = False


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A stored response. `body` is the Response object without its output."""

    id: str
    owner: str
    status: ResponseStatus
    background: bool
    logged: bool
    conversation_id: str | None
    previous_id: str | None
    body: bytes


@dataclass(frozen=True, slots=True)
class QueuedResponse:
    """A background response that is to run. size: bytes of its input, history and request"""

    id: str
    size: int


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """A conversation. bytes: size of its items"""

    id: str
    owner: str
    created_at: int
    metadata: dict[str, str]
    bytes: int
