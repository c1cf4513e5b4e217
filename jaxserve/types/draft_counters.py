"""Counters of speculation since the start of an engine. A msgspec Struct, because it crosses the socket."""

from __future__ import annotations

import msgspec


class DraftCounters(msgspec.Struct, array_like=True):
    """Counts drafts and how many of them were right.

    num_drafts: rows with drafts that were read. accepted_per_pos: drafts that became output, by their place.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_pos: list[int] = []

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count a row with so many drafts, of which the first `num_accepted` became output."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.accepted_per_pos += [0] * (num_drafts - len(self.accepted_per_pos))
        for place in range(num_accepted):
            self.accepted_per_pos[place] += 1

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_pos)
