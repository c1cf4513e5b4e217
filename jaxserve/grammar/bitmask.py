"""Fills the token masks of many rows at once, on all cores and without the GIL."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import llguidance.numpy
import numpy as np

from jaxserve.grammar.matcher import GrammarMatcher
from jaxserve.grammar.token_mask import Matcher


class BitmaskFiller:
    """Fills masks in threads of llguidance. num_threads: None takes 80 % of the cores, at most 32."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._executor = llguidance.LLExecutor(num_threads)

    def fill(self, rows: Sequence[tuple[Matcher, int]], bitmask: np.ndarray) -> None:
        """Fill row r of bitmask int32 [R, ceil(V/32)] (all ones on entry, C-contiguous) for each (matcher, r).

        Has the signature FillRows. Rows whose mask depends only on the grammar are filled in parallel, the others on
        this thread.
        """
        parallel = []
        for matcher, row in rows:
            if isinstance(matcher, GrammarMatcher) and matcher.in_grammar:
                parallel.append((matcher.ll, row))
            else:
                matcher.fill(bitmask[row])
        if parallel:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, parallel, bitmask)
