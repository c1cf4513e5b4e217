"""The interface between what guesses tokens and what verifies them.

A drafter guesses the next tokens of a request. The model then computes all of them in one step, and the sampler keeps
those that it would have drawn anyway. So a drafter changes the time that an output takes and never its tokens.
"""

from __future__ import annotations

from typing import Protocol

from jaxserve.types.step import Request


class Drafter(Protocol):
    """Guesses tokens. One drafter serves all requests of an engine."""

    def propose(self, request: Request, most: int) -> list[int]:
        """Return at most `most` tokens that are likely to follow the known tokens of a request; none if it has no
        guess.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop what was kept for a request that has ended. It may be unknown."""
        ...


class DraftMasks(Protocol):
    """The token masks of requests, as far as drafts need them."""

    def forced(self, request_id: str, most: int) -> list[int]:
        """Return at most `most` tokens that the request's grammar prescribes after its known tokens."""
        ...

    def allow(self, request_id: str, drafts: list[int]) -> list[int]:
        """Return the first drafts that the mask allows, and keep the masks after each of them for the next step."""
        ...
