"""What the bodies of requests may cost one server: bytes of one and of all, and of JSON its structures and values.

The limits of single fields stand in limits.py. docs/reliability.md shows the table below; a test holds it to this.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import ServerSection
from jaxserve.errors import PayloadTooLargeError, QueueFullError
from jaxserve.json_cost import JsonLimits, most_structures, over_limit

MIN_BODY_BYTES = 8 * 2**20  # what max_body_bytes: auto is at least: two thousand short texts for embeddings
MAX_BODY_BYTES = 64 * 2**20  # and at most; also of a batch's line
BYTES_A_TOKEN = 32  # of the context: escaped text of any script, with the tools around it
MIN_SUM_BYTES = 512 * 2**20  # of all bodies in hand
BODIES_IN_SUM = 8  # of the largest size

OBJECTS = 16_384  # to validate one takes 0.8 us in a call that holds the lock; with names they are a third of all
STRUCTURES = 40_000  # 4,096 messages with a part each, or 1,024 tools with a schema of 38
VALUES = 192 * 1024  # or the context and SPARE_VALUES, if that is more
SPARE_VALUES = 64 * 1024
EMBEDDING_VALUES = 320 * 1024  # OpenAI takes 300,000 tokens in a request

LARGE_BYTES = 64 * 1024  # bodies with more are decoded off the event loop
LARGE_STRUCTURES = 4096  # likewise; to validate so many and to look for unknown fields takes up to 6 ms


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Of one server, which serves a model with that context."""

    max_bytes: int
    max_sum: int
    context: int

    @classmethod
    def of(cls, section: ServerSection, context: int) -> BodyLimits:
        asked = section.max_body_bytes
        if asked == "auto":
            asked = min(MAX_BODY_BYTES, max(MIN_BODY_BYTES, BYTES_A_TOKEN * context))
        return cls(asked, max(MIN_SUM_BYTES, BODIES_IN_SUM * asked), context)

    def json_limits(self, path: str) -> JsonLimits:
        least = EMBEDDING_VALUES if path == "/v1/embeddings" else VALUES
        return JsonLimits(STRUCTURES, max(least, self.context + SPARE_VALUES), OBJECTS)

    def check_size(self, size: int) -> None:
        """Raises PayloadTooLargeError."""
        if size > self.max_bytes:
            raise PayloadTooLargeError(f"The body is larger than the limit of {self.max_bytes} bytes.")

    def check_json(self, raw: bytes, path: str) -> None:
        """Raises PayloadTooLargeError for a body that would cost too much to decode."""
        self.check_size(len(raw))
        over = over_limit(raw, self.json_limits(path))
        if over is not None:
            raise PayloadTooLargeError(f"The body has more than {over}.")


def is_large(raw: bytes) -> bool:
    """Whether to decode the body off the event loop."""
    return len(raw) > LARGE_BYTES or (len(raw) > LARGE_STRUCTURES and most_structures(raw) > LARGE_STRUCTURES)


def max_line_bytes(section: ServerSection) -> int:
    """Of a batch's line, which is checked before a model is known."""
    asked = section.max_body_bytes
    return MAX_BODY_BYTES if asked == "auto" else asked


class BodySum:
    """Bytes of the bodies of all requests in hand."""

    def __init__(self) -> None:
        self.held = 0

    def check(self, more: int, limit: int) -> None:
        """Raises QueueFullError if so much more would be too much."""
        if self.held + more > limit:
            raise QueueFullError(f"The bodies of requests in hand are more than {limit} bytes.")
