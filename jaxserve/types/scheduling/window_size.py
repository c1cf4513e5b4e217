"""Computes how many sliding-window pages a request needs. Pure arithmetic for the scheduler and the memory plan.

The page at index i holds the positions [i * page_size, (i + 1) * page_size), as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowSize:
    """Computes with the sizes of a window, a page and a step.

    window: tokens that a token sees, itself included. chunk: maximum number of prompt tokens per step.

    tokens_per_step: maximum number of tokens of a decode row, drafts included
    """

    window: int
    page_size: int
    chunk: int
    tokens_per_step: int = 1

    def first_of_prefix(self, num_pages: int) -> int:
        """Return the index of the first page that the token after a prefix of so many pages sees."""
        return max(0, (num_pages * self.page_size - self.window + 1) // self.page_size)

    def first_needed(self, position: int) -> int:
        """Return the index of the first page to keep for tokens from `position` on.

        These tokens see it, or an equal request that starts at the last page boundary before `position` does. So the
        computed pages stay usable as a prefix until the next boundary.
        """
        return self.first_of_prefix((position - 1) // self.page_size)

    def next_release(self, position: int) -> int:
        """Return the next position at which `first_needed` can change."""
        return ((position - 1) // self.page_size + 1) * self.page_size + 1

    @property
    def decoding(self) -> int:
        """Maximum number of pages of a decoding request, with one step in flight and the next one."""
        return self._span(2 * self.tokens_per_step)

    @property
    def prefilling(self) -> int:
        """Maximum number of pages of a request in prefill, with one chunk in flight and the next one."""
        return self._span(2 * max(self.chunk, self.tokens_per_step))

    def most(self, longest: int) -> int:
        """Return the maximum number of pages of a decoding request of at most `longest` tokens."""
        return min(self.decoding, -(-longest // self.page_size))

    def for_requests(self, count: int) -> int:
        """Return the number of pages that so many requests can hold at once, plus as many windows for unused cached
        prefixes.

        Two prefill chunks are included.
        """
        return 2 * count * self.decoding + 2 * -(-self.chunk // self.page_size)

    def least(self, longest: int) -> int:
        """Return the fewest pages with which a sequence of `longest` tokens can run alone, with any cached prefix."""
        return min(2 * self.decoding, -(-longest // self.page_size))

    def _span(self, new: int) -> int:
        """Return the maximum number of pages that `new` tokens, the window before them and up to a page before it can
        touch.
        """
        return (self.window + new - 3) // self.page_size + 3
