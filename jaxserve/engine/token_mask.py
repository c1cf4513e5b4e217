"""Which tokens a request may sample next, where the host must say so: its grammar and its bad words of several tokens.

The EngineCore keeps one TokenMask a constrained request; the scheduler only knows that the request is `masked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.engine.request import SamplingParams


class Matcher(Protocol):
    """A grammar at one point of one output. Made from the whole GrammarSpec, `begin_after` included."""

    @property
    def is_terminated(self) -> bool:
        """Nothing may follow."""
        ...

    def fill(self, bitmask_row: np.ndarray) -> None:
        """Write the allowed tokens into int32 [ceil(V/32)], bit 1 allows; all ones on entry."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance; False if the grammar does not allow the token."""
        ...


class TokenMask:
    """bad_words of one token are the device's; here are those that depend on the tokens before."""

    def __init__(self, matcher: Matcher | None, bad_words: Sequence[tuple[int, ...]]) -> None:
        self._matcher = matcher
        self._bad_words = bad_words
        self._longest = max((len(word) for word in bad_words), default=1)
        self._tail: list[int] = []  # as many of the last output tokens as a bad word has before its last one

    @classmethod
    def of(cls, params: SamplingParams, matcher: Matcher | None) -> TokenMask | None:
        """None if the host has nothing to say."""
        bad_words = [word for word in params.bad_words_token_ids if len(word) > 1]
        return cls(matcher, bad_words) if matcher is not None or bad_words else None

    @property
    def is_terminated(self) -> bool:
        return self._matcher is not None and self._matcher.is_terminated

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance by tokens of the output; False if the grammar does not allow one of them."""
        if self._bad_words:
            self._tail = [*self._tail, *token_ids][1 - self._longest :]
        return self._matcher is None or all(self._matcher.accept(token) for token in token_ids)

    def fill(self, row: np.ndarray) -> None:
        """row: int32 [ceil(V/32)], all ones on entry."""
        if self._matcher is not None:
            self._matcher.fill(row)
        for word in self._bad_words:
            *before, last = word
            if self._tail[-len(before) :] == before:
                row.view(np.uint32)[last // 32] &= ~np.uint32(1 << last % 32)
