"""The interface that runs one batch request, as the rest of this package sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class LineAnswer(NamedTuple):
    """The answer of a batch request. `body` is JSON without newlines."""

    status: int
    body: bytes


class LineHandler(Protocol):
    """Run one request for the API key `owner`. Cancelling the call also aborts it in the engine.

    Raises HTTPError if an online client would be answered with an error.
    """

    async def __call__(self, body: bytes, request_id: str, owner: str) -> LineAnswer: ...


Handlers = Mapping[str, LineHandler]  # handler of each endpoint, named with the /v1 prefix
