"""Drafts from the request's own text: the tokens that followed the last occurrence of its latest tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jaxserve.types.step import Request

ALWAYS_INDEXED = 64  # a call with at most so many new tokens indexes all of them, whatever the rate
MAX_COMPARED = 8  # earlier occurrences that are compared for the longest match
MAX_INDEXED = 4096  # tokens that one call adds to an index; 0.4 us each
INDEXED_PER_SECOND = 250_000  # of all requests together: a tenth of the thread's time


class NGramIndex:
    """The occurrences of each n-gram in one sequence, latest first.

    smallest: tokens of an n-gram that must match. largest: tokens beyond which a longer match counts no more.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest = smallest
        self._largest = largest
        self._tokens: list[int] = []
        self._latest: dict[int, int] = {}  # hash of an n-gram -> index of the token after its last occurrence
        self._earlier: list[int] = []  # the same index of the occurrence before, by index; 0: none

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        tokens, latest, earlier, size = self._tokens, self._latest, self._earlier, self._smallest
        first = len(tokens)
        tokens += token_ids
        for index in range(first, len(tokens)):
            if index < size:
                earlier.append(0)
                continue
            key = hash(tuple(tokens[index - size : index]))
            earlier.append(latest.get(key, 0))
            latest[key] = index

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens that followed the longest match of the sequence's end, the latest of equal
        ones.

        A match that reaches the end is a repetition; the drafts repeat it.
        """
        if len(self._tokens) < self._smallest:
            return []
        begin, longest = 0, self._smallest - 1
        index = self._latest.get(hash(tuple(self._tokens[-self._smallest :])), 0)
        for _ in range(MAX_COMPARED):
            if not index or longest >= self._largest:
                break
            if (length := self._match(index)) > longest:
                begin, longest = index, length
            index = self._earlier[index]
        if not begin:
            return []
        found = self._tokens[begin : begin + most]
        while len(found) < most:
            found += found[: most - len(found)]
        return found

    def _match(self, index: int) -> int:
        """Return how many tokens before `index` equal the last ones of the sequence, at most `largest`."""
        tokens, end, length = self._tokens, len(self._tokens), 0
        while length < min(self._largest, index) and tokens[index - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class NGramDrafter:
    """The `Drafter` of method ngram. smallest, largest: as in NGramIndex."""

    def __init__(self, smallest: int, largest: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sizes = smallest, largest
        self._indices: dict[str, NGramIndex] = {}
        self._clock = clock
        self._last = clock()
        self._room = float(MAX_INDEXED)  # tokens that may be indexed now

    def propose(self, request: Request, most: int) -> list[int]:
        """See `Drafter`. A long prompt is indexed in several calls, and the first ones return nothing."""
        index = self._indices.get(request.request_id)
        if index is None:
            index = self._indices[request.request_id] = NGramIndex(*self._sizes)
        known, done = request.num_tokens, len(index)
        if done < known:
            index.extend(request.token_ids(done, done + self._take(known - done)))
        return index.propose(most) if len(index) == known else []

    def _take(self, wanted: int) -> int:
        """Return how many of `wanted` tokens may be indexed now. A few, as one step yields them, always may."""
        if wanted <= ALWAYS_INDEXED:
            return wanted
        now = self._clock()
        self._room = min(MAX_INDEXED, self._room + (now - self._last) * INDEXED_PER_SECOND)
        self._last = now
        taken = min(wanted, int(self._room))
        self._room -= taken
        return taken

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)
