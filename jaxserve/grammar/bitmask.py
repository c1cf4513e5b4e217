"""Token masks of many rows at once, on all cores without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import llguidance.numpy
import numpy as np

from jaxserve.grammar.matcher import GrammarMatcher


class BitmaskFiller:
    """num_threads: None takes 80 % of the cores, at most 32."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._executor = llguidance.LLExecutor(num_threads)

    def fill(self, rows: Sequence[tuple[GrammarMatcher, int]], bitmask: np.ndarray) -> None:
        """Fill row r of bitmask int32 [R, ceil(V/32)] (all ones on entry, C-contiguous) for each (matcher, r)."""
        parallel = [(matcher.ll, row) for matcher, row in rows if matcher.in_grammar]
        if parallel:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, parallel, bitmask)
        for matcher, row in rows:
            if not matcher.in_grammar:
                matcher.fill(bitmask[row])
