"""Which tokens a request may sample next, where the host must say so: its grammar and its bad words of several tokens.

The EngineCore keeps one TokenMask a constrained request, in a MaskTable; the scheduler only knows `masked`.
A matcher is made from what a client sent: one that raises ends its own request and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxserve.engine.request import FinishReason, SamplingParams, SchedulerOutput, TokenOutput

logger = logging.getLogger(__name__)

MIN_PARALLEL = 4  # grammars; fewer are filled sooner than threads are woken


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

    def fill(self, bitmask_row: np.ndarray) -> None:
        """Write the allowed tokens into int32 [ceil(V/32)], bit 1 allows; all ones on entry."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance; False if the grammar does not allow the token."""
        ...


# Fills row r of a bitmask for each (matcher, r), all rows at once. May raise for any of them.
FillRows = Callable[[Sequence[tuple[Matcher, int]], np.ndarray], None]


class TokenMask:
    """bad_words of one token are the device's; here are those that depend on the tokens before."""

    def __init__(self, matcher: Matcher | None, bad_words: Sequence[tuple[int, ...]]) -> None:
        self.matcher = matcher
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
        return self.matcher is not None and self.matcher.is_terminated

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance by tokens of the output; False if the grammar does not allow one of them."""
        if self._bad_words:
            self._tail = [*self._tail, *token_ids][1 - self._longest :]
        return self.matcher is None or all(self.matcher.accept(token) for token in token_ids)

    def fill(self, row: np.ndarray) -> None:
        """row: int32 [ceil(V/32)], all ones on entry."""
        if self.matcher is not None:
            self.matcher.fill(row)
        self.ban(row)

    def ban(self, row: np.ndarray) -> None:
        """The bad words' part of `fill`."""
        for word in self._bad_words:
            *before, last = word
            if self._tail[-len(before) :] == before:
                row.view(np.uint32)[last // 32] &= ~np.uint32(1 << last % 32)


class MaskTable:
    """The masks of live requests. fill_rows: fills many grammars on all cores; None fills one after the other."""

    def __init__(self, vocab_size: int, fill_rows: FillRows | None = None) -> None:
        self._fill_rows = fill_rows
        self._num_words = -(-vocab_size // 32)
        self._masks: dict[str, TokenMask] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, request_id: str, mask: TokenMask) -> None:
        self._masks[request_id] = mask

    def drop(self, request_id: str) -> None:
        self._masks.pop(request_id, None)

    def advance(self, output: TokenOutput) -> FinishReason | None:
        """Show a request's new tokens to its mask. STOP: its grammar is complete. ERROR: they left it."""
        mask = self._masks.get(output.request_id)
        if mask is None or output.finish_reason is not None:
            return None
        try:
            if not mask.accept(output.token_ids):
                return FinishReason.ERROR
            return FinishReason.STOP if mask.is_terminated else None
        except Exception:
            logger.exception("%s: the grammar's matcher failed", output.request_id)
            return FinishReason.ERROR

    def failure(self, request_id: str) -> tuple[str, int]:
        """Message and HTTP status for a request whose mask ended it with an error."""
        mask = self._masks.get(request_id)
        limit = mask.matcher.limit_error if mask is not None and mask.matcher is not None else None
        if limit is not None:
            return f"this grammar cannot be enforced, it grew over a limit while the output was made: {limit}", 400
        return "the output left the grammar", 500

    def bitmask(self, output: SchedulerOutput) -> tuple[np.ndarray, list[str]]:
        """int32 [R, ceil(V/32)] for a step, and the requests whose matcher failed, which may sample anything.

        Made anew for every step: the device may still read the last one's.
        """
        bits = np.full((len(output.rows), self._num_words), -1, np.int32)
        masks = [
            (i, row.request_id, self._masks[row.request_id])
            for i, row in enumerate(output.rows)
            if row.masked and row.request_id in self._masks  # the others ended meanwhile
        ]
        if self._fill_together(masks, bits):
            return bits, []
        bits[:] = -1
        return bits, [name for i, name, mask in masks if not _filled(mask, bits[i], name)]

    def _fill_together(self, masks: Sequence[tuple[int, str, TokenMask]], bits: np.ndarray) -> bool:
        """Whether all rows could be filled at once."""
        matchers = [(mask.matcher, i) for i, _, mask in masks if mask.matcher is not None]
        if self._fill_rows is None or len(matchers) < MIN_PARALLEL:
            return False
        try:
            self._fill_rows(matchers, bits)
        except Exception:  # one by one, they show which of them failed
            return False
        for i, _, mask in masks:
            mask.ban(bits[i])
        return True


def _filled(mask: TokenMask, row: np.ndarray, request_id: str) -> bool:
    try:
        mask.fill(row)
    except Exception:
        logger.exception("%s: the grammar's matcher failed", request_id)
        return False
    return True
