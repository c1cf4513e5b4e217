"""What runs one line of a batch, as the rest of this package sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class LineAnswer(NamedTuple):
    """`body` is JSON without newlines."""

    status: int
    body: bytes


class LineHandler(Protocol):
    """Runs one request of the API key `owner`. Cancelling the call ends it in the engine too.

    Raises HTTPError where an online client would be answered with an error.
    """

    async def __call__(self, body: bytes, request_id: str, owner: str) -> LineAnswer: ...


Handlers = Mapping[str, LineHandler]  # by endpoint, with the /v1 prefix
