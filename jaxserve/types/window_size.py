"""How many pages of the layers with a sliding window a request needs. Pure arithmetic: the scheduler's and the plan's.

Pages count as everywhere: the page at index i holds the positions [i * page_size, (i + 1) * page_size).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowSize:
    """window: tokens that a token sees, itself included. chunk: prompt tokens that a step may hold at most."""

    window: int
    page_size: int
    chunk: int
    tokens_per_step: int = 1

    def first_of_prefix(self, num_pages: int) -> int:
        """Index of the first page that the token behind a prefix of so many pages sees."""
        return max(0, (num_pages * self.page_size - self.window + 1) // self.page_size)

    def first_needed(self, position: int) -> int:
        """Index of the first page that tokens from `position` on see, or those of an equal request from the last page
        border before it on: what was computed can serve as somebody's prefix until the next border."""
        return self.first_of_prefix((position - 1) // self.page_size)

    def next_release(self, position: int) -> int:
        """The next position whose `first_needed` can be another one."""
        return ((position - 1) // self.page_size + 1) * self.page_size + 1

    @property
    def decoding(self) -> int:
        """Most pages of a request that decodes: with a step in flight and the next one."""
        return self._span(2 * self.tokens_per_step)

    @property
    def prefilling(self) -> int:
        """Most pages of a request whose prompt is computed: with a chunk in flight and the next one."""
        return self._span(2 * max(self.chunk, self.tokens_per_step))

    def most(self, longest: int) -> int:
        """Most pages of a request of at most `longest` tokens that decodes."""
        return min(self.decoding, -(-longest // self.page_size))

    def for_requests(self, count: int) -> int:
        """Pages that so many requests at once can hold, two chunks of their prompts among them, and as many windows
        again for prefixes that nobody is using."""
        return 2 * count * self.decoding + 2 * -(-self.chunk // self.page_size)

    def least(self, longest: int) -> int:
        """Pages with which a sequence of `longest` tokens can run alone, whatever prefix it begins with."""
        return min(2 * self.decoding, -(-longest // self.page_size))

    def _span(self, new: int) -> int:
        """Pages that `new` tokens, the window before them and up to a page before that can lie on."""
        return (self.window + new - 3) // self.page_size + 3
