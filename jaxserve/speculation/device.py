"""Drafts that the device proposes after a step: kept by request until the step that computes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxserve.types.step import Request

FIRST_RATE = 0.7  # assumed before any draft was compared: the operator chose a model that guesses well


class DeviceDrafts:
    """The `Drafter` of a draft model. Its guesses arrive with the tokens of the step before.

    vocab_size: of the served model, whose checkpoint is another than the one that the guesses come from
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._found: dict[str, tuple[int, list[int]]] = {}  # by request: position of the first draft, and the drafts

    def take(self, request: Request, drafts: Sequence[int]) -> None:
        """Keep the drafts that follow a request's known tokens, up to the first that is no token, such as -1."""
        tokens = itertools.takewhile(lambda draft: 0 <= draft < self._vocab_size, drafts)
        self._found[request.request_id] = request.num_tokens, list(tokens)

    def propose(self, request: Request, most: int) -> list[int]:
        """See `Drafter`. As long as new tokens are the drafts, those after them are still guesses."""
        first, drafts = self._found.get(request.request_id, (0, []))
        passed = request.num_tokens - first
        if passed > len(drafts) or request.token_ids(first, request.num_tokens) != drafts[:passed]:
            return []
        return drafts[passed : passed + most]

    def forget(self, request_id: str) -> None:
        """Drop the drafts of a request that has ended."""
        self._found.pop(request_id, None)
