"""The tokens that a request may sample next if the host decides it: by grammars and multi-token bad words.

A matcher is made from a client's input. If it raises, only its own request ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import QUICK, FinishReason, MaskBudget

logger = logging.getLogger(__name__)


class Matcher(Protocol):
    """The state of a grammar within one output. Made from the whole GrammarSpec, `begin_after` included."""

    @property
    def is_terminated(self) -> bool:
        """Whether only the end of the output may follow."""
        ...

    @property
    def limit_error(self) -> str | None:
        """The parser limit that the grammar exceeded, if that ended it: the request's fault, not the model's."""
        ...

    @property
    def was_slow(self) -> bool:
        """Whether a mask of the same grammar has taken longer than QUICK."""
        ...

    def fill(self, bitmask_row: np.ndarray) -> None:
        """Write the allowed tokens into int32 [ceil(V/32)], bit 1 allows; all ones on entry."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False if the grammar does not allow it."""
        ...

    @property
    def drafts_allowed(self) -> bool:
        """Whether tokens can be taken back quickly here."""
        ...

    def prefix(self, token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens the grammar allows. Changes nothing."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens that the grammar prescribes next."""
        ...

    def rollback(self, num_tokens: int) -> bool:
        """Take back the last tokens. Returns False if that is not possible."""
        ...


class TokenMask:
    """The token mask of one request. The device handles bad words of one token, this mask bad words of several.

    budget      CPU time budget of the request, shared by its choices
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
        self._tail: list[int] = []  # the last output tokens, as many as a bad word has before its last one

    @classmethod
    def of(cls, params: SamplingParams, matcher: Matcher | None, budget: MaskBudget | None = None) -> TokenMask | None:
        """Return the mask of a request; None if it needs no mask from the host."""
        bad_words = [word for word in params.bad_words_token_ids if len(word) > 1]
        return cls(matcher, bad_words, budget) if matcher is not None or bad_words else None

    @property
    def is_terminated(self) -> bool:
        return self.matcher is not None and self.matcher.is_terminated

    @property
    def is_slow(self) -> bool:
        """Whether a thread should compute its masks."""
        return self.matcher is not None and self.budget.is_slow

    @property
    def error(self) -> str | None:
        """The exceeded limit, of the parser or of the request's budget; None if there is none."""
        return None if self.matcher is None else self.budget.error or self.matcher.limit_error

    def advance(self, token_ids: Sequence[int], request_id: str) -> FinishReason | None:
        """Pass new output tokens. STOP: the grammar is complete. ERROR: they violate it, or it exceeded a limit."""
        try:
            if not self.accept(token_ids) or self.error is not None:
                return FinishReason.ERROR
            return FinishReason.STOP if self.is_terminated else None
        except Exception:
            logger.exception("%s: the grammar's matcher failed", request_id)
            return FinishReason.ERROR

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance by output tokens. Returns False if the grammar does not allow one of them."""
        return self._advance(token_ids, len(token_ids))

    def _advance(self, token_ids: Sequence[int], num_outputs: int) -> bool:
        """Advance by tokens. num_outputs: how many of them are output for good, which adds to the budget"""
        if self._bad_words:
            self._tail = [*self._tail, *token_ids][1 - self._longest :]
        if self.matcher is None:
            return True
        began = time.thread_time()
        accepted = all(self.matcher.accept(token) for token in token_ids)
        self.budget.charge(time.thread_time() - began, num_outputs)
        return accepted

    def try_fill(self, row: np.ndarray, request_id: str) -> bool:
        """Fill row, int32 [ceil(V/32)], like `fill`. Returns False if the request must end instead."""
        try:
            if self.error is not None:  # another choice of the request may have used up the budget
                return False
            self.fill(row)
            return self.error is None
        except Exception:
            logger.exception("%s: the grammar's matcher failed", request_id)
            return False

    def fill(self, row: np.ndarray) -> None:
        """Write the allowed tokens into row, int32 [ceil(V/32)], all ones on entry."""
        if self.matcher is not None:
            began = time.thread_time()
            self.matcher.fill(row)
            spent = time.thread_time() - began
            self.is_quick = spent < QUICK
            self.budget.charge(spent)
        self.ban(row)

    def forced(self, request_id: str) -> list[int]:
        """Return the tokens that the grammar prescribes next."""
        if self.matcher is None or not self.matcher.drafts_allowed:
            return []
        try:
            return self.matcher.forced()
        except Exception:  # only a guess is lost; the request ends if its mask fails too
            logger.exception("%s: the grammar's matcher failed", request_id)
            return []

    def fill_ahead(self, drafts: Sequence[int], rows: np.ndarray, request_id: str) -> int:
        """Fill row i of `rows`, int32 [n, ceil(V/32)], all ones on entry, with the mask after drafts[: i + 1].

        Returns how many drafts are allowed and do not complete the grammar; no other rows are filled. The mask is as
        before.
        """
        tail, done = self._tail, 0
        try:
            if self.error is not None or not (self.matcher is None or self.matcher.drafts_allowed):
                return 0
            allowed = len(drafts) if self.matcher is None else self.matcher.prefix(drafts)
            for draft, row in zip(drafts[:allowed], rows, strict=False):
                if not self._advance([draft], 0):
                    break
                done += 1
                if self.is_terminated:
                    break
                self.fill(row)
            return done - self.is_terminated
        except Exception:
            logger.exception("%s: the grammar's matcher failed", request_id)
            return 0
        finally:
            self._tail = tail
            if self.matcher is not None and done:
                self.matcher.rollback(done)

    def ban(self, row: np.ndarray) -> None:
        """Clear the bits of tokens that would complete a bad word in row, int32 [ceil(V/32)]."""
        for word in self._bad_words:
            *before, last = word
            if self._tail[-len(before) :] == before:
                row.view(np.uint32)[last // 32] &= ~np.uint32(1 << last % 32)
