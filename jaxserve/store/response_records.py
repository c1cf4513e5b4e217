"""The plain data of stored responses and conversations. An item or object of the API is kept as its JSON bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

RESPONSE_SECONDS = 30 * 24 * 3600  # as at OpenAI
EVENT_SECONDS = 3600  # the events of a background response are kept so long after its end
MAX_TURNS = 1000  # responses in a chain
MAX_HISTORY_BYTES = 32 * 2**20  # of the items of a chain or a conversation
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
    """An item of a response or a conversation. body: its JSON, with the id"""

    id: str
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body)


@dataclass(frozen=True, slots=True)
class History:
    """What comes before the input of a response. turns: responses in it; bytes: of its items"""

    items: tuple[StoredItem, ...] = ()
    turns: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response to store.

    input: its own items only; history: what was before, if it continues a response
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
    """A background response that is to run. size: bytes of all that it is made from"""

    id: str
    size: int


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """A conversation. bytes: of its items"""

    id: str
    owner: str
    created_at: int
    metadata: dict[str, str]
    bytes: int
