"""Limit the cost of request bodies: bytes of one body and of all bodies, JSON containers and values of one body.

The limits of single fields are in ranges.py. docs/reliability.md shows the table below, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.config import ServerSection
from jaxserve.errors import PayloadTooLargeError, QueueFullError
from jaxserve.text.json_cost import JsonLimits, most_structures, over_limit

MIN_BODY_BYTES = 8 * 2**20  # the least value of max_body_bytes: auto; 2,000 short texts for embeddings fit
MIN_PICTURE_BODY_BYTES = 32 * 2**20  # likewise, for a model that takes pictures: a picture of 20 MB as base64
MAX_BODY_BYTES = 64 * 2**20  # its greatest value, and the limit of a batch request
BYTES_A_TOKEN = 32  # bytes per token of context: escaped text of any script, with the tools around it
MIN_SUM_BYTES = 512 * 2**20  # of all bodies in memory
BODIES_IN_SUM = 8  # as a multiple of the largest body
LONGEST_CONTEXT = 2**21  # tokens; for a body that is read before the context of its model is known

OBJECTS = 16_384  # validating one takes 0.8 us and holds the GIL; with names they are a third of all
STRUCTURES = 40_000  # 4,096 messages with a part each, or 1,024 tools with a schema of 38
VALUES = 192 * 1024  # or the context length plus SPARE_VALUES, if that is more
SPARE_VALUES = 64 * 1024
EMBEDDING_VALUES = 320 * 1024  # OpenAI accepts 300,000 tokens per request

LARGE_BYTES = 64 * 1024  # bodies with more are decoded off the event loop
LARGE_STRUCTURES = 4096  # likewise; validating so many and looking for unknown fields takes up to 6 ms


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of a server whose model has the given context length."""

    max_bytes: int
    max_sum: int
    context: int

    @classmethod
    def of(cls, section: ServerSection, context: int, *, takes_pictures: bool = False) -> BodyLimits:
        asked = section.max_body_bytes
        if asked == "auto":
            least = MIN_PICTURE_BODY_BYTES if takes_pictures else MIN_BODY_BYTES
            asked = min(MAX_BODY_BYTES, max(least, BYTES_A_TOKEN * context))
        return cls(asked, max(MIN_SUM_BYTES, BODIES_IN_SUM * asked), context)

    def json_limits(self, path: str) -> JsonLimits:
        least = EMBEDDING_VALUES if path == "/v1/embeddings" else VALUES
        return JsonLimits(STRUCTURES, max(least, self.context + SPARE_VALUES), OBJECTS)

    def check_size(self, size: int) -> None:
        """Check the number of bytes. Raises PayloadTooLargeError."""
        if size > self.max_bytes:
            raise PayloadTooLargeError(f"The body is larger than the limit of {self.max_bytes} bytes.")

    def check_json(self, raw: bytes, path: str) -> None:
        """Check the cost of decoding a body. Raises PayloadTooLargeError."""
        self.check_size(len(raw))
        over = over_limit(raw, self.json_limits(path))
        if over is not None:
            raise PayloadTooLargeError(f"The body has more than {over}.")


def is_large(raw: bytes) -> bool:
    """Return whether to decode the body off the event loop."""
    return len(raw) > LARGE_BYTES or (len(raw) > LARGE_STRUCTURES and most_structures(raw) > LARGE_STRUCTURES)


def max_line_bytes(section: ServerSection) -> int:
    """Return the limit of a batch request, which is checked before the model is known."""
    asked = section.max_body_bytes
    return MAX_BODY_BYTES if asked == "auto" else asked


class BodySum:
    """The bytes of all request bodies in memory.

    row, column: the place that counts the bytes of this process. whole: returns the bytes of all processes
    """

    def __init__(
        self, row: list[float] | memoryview[float], column: int = 0, whole: Callable[[], float] | None = None
    ) -> None:
        self._row = row
        self._column = column
        self._whole = whole

    @property
    def held(self) -> float:
        return self._row[self._column] if self._whole is None else self._whole()

    def add(self, size: int) -> None:
        """Count `size` bytes that arrived. A negative size counts bytes that were freed."""
        self._row[self._column] += size

    def check(self, more: int, limit: int) -> None:
        """Raise QueueFullError if `more` bytes would exceed the limit."""
        if self.held + more > limit:
            raise QueueFullError(f"The bodies of requests in hand are more than {limit} bytes.")
