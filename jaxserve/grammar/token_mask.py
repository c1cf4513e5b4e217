"""Which tokens a request may sample next, where the host must say so: its grammar and its bad words of several tokens.

A matcher is made from what a client sent: one that raises ends its own request and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.types.mask_budget import QUICK, MaskBudget
from jaxserve.types.output import FinishReason
from jaxserve.types.sampling import SamplingParams

logger = logging.getLogger(__name__)


class Matcher(Protocol):
    """A grammar at one point of one output. Made from the whole GrammarSpec, `begin_after` included."""

    @property
    def is_terminated(self) -> bool:
        """Nothing may follow."""
        ...

    @property
    def limit_error(self) -> str | None:
        """The limit of the parser that the grammar ran into, if that ended it: the grammar's fault."""
        ...

    @property
    def was_slow(self) -> bool:
        """A mask of the same grammar took longer than QUICK before."""
        ...

    def fill(self, bitmask_row: np.ndarray) -> None:
        """Write the allowed tokens into int32 [ceil(V/32)], bit 1 allows; all ones on entry."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance; False if the grammar does not allow the token."""
        ...


class TokenMask:
    """bad_words of one token are the device's; here are those that depend on the tokens before.

    budget      of the request, shared by its choices
    is_quick    the grammar's last mask took less than QUICK
    """

    def __init__(
        self, matcher: Matcher | None, bad_words: Sequence[tuple[int, ...]], budget: MaskBudget | None = None
    ) -> None:
        self.matcher = matcher
        self.is_quick = matcher is None
        self.budget = budget or MaskBudget()
        self.budget.is_slow |= matcher is not None and matcher.was_slow
        self._bad_words = bad_words
        self._longest = max((len(word) for word in bad_words), default=1)
        self._tail: list[int] = []  # as many of the last output tokens as a bad word has before its last one

    @classmethod
    def of(cls, params: SamplingParams, matcher: Matcher | None, budget: MaskBudget | None = None) -> TokenMask | None:
        """None if the host has nothing to say."""
        bad_words = [word for word in params.bad_words_token_ids if len(word) > 1]
        return cls(matcher, bad_words, budget) if matcher is not None or bad_words else None

    @property
    def is_terminated(self) -> bool:
        return self.matcher is not None and self.matcher.is_terminated

    @property
    def is_slow(self) -> bool:
        """Whether the loop should not make its masks."""
        return self.matcher is not None and self.budget.is_slow

    @property
    def error(self) -> str | None:
        """The limit that the grammar went over, the parser's or the request's budget."""
        return None if self.matcher is None else self.budget.error or self.matcher.limit_error

    def advance(self, token_ids: Sequence[int], request_id: str) -> FinishReason | None:
        """Show it new tokens of the output. STOP: the grammar is complete. ERROR: they left it, or it met a limit."""
        try:
            if not self.accept(token_ids) or self.error is not None:
                return FinishReason.ERROR
            return FinishReason.STOP if self.is_terminated else None
        except Exception:
            logger.exception("%s: the grammar's matcher failed", request_id)
            return FinishReason.ERROR

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance by tokens of the output; False if the grammar does not allow one of them."""
        if self._bad_words:
            self._tail = [*self._tail, *token_ids][1 - self._longest :]
        if self.matcher is None:
            return True
        began = time.thread_time()
        accepted = all(self.matcher.accept(token) for token in token_ids)
        self.budget.charge(time.thread_time() - began, len(token_ids))
        return accepted

    def try_fill(self, row: np.ndarray, request_id: str) -> bool:
        """`fill`; False if the request has to end instead."""
        try:
            if self.error is not None:  # a sibling may have spent the budget
                return False
            self.fill(row)
            return self.error is None
        except Exception:
            logger.exception("%s: the grammar's matcher failed", request_id)
            return False

    def fill(self, row: np.ndarray) -> None:
        """row: int32 [ceil(V/32)], all ones on entry."""
        if self.matcher is not None:
            began = time.thread_time()
            self.matcher.fill(row)
            spent = time.thread_time() - began
            self.is_quick = spent < QUICK
            self.budget.charge(spent)
        self.ban(row)

    def ban(self, row: np.ndarray) -> None:
        """The bad words' part of `fill`."""
        for word in self._bad_words:
            *before, last = word
            if self._tail[-len(before) :] == before:
                row.view(np.uint32)[last // 32] &= ~np.uint32(1 << last % 32)
