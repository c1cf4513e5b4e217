"""N-gram drafts: guesses of a request's next tokens from its own text, and how many of them a step computes.

A drafter guesses the next tokens of a request. The model then computes all of them in one step, and the sampler keeps
the tokens that it would have drawn anyway. So a drafter changes the time that an output takes and never its tokens.

    Drafter, DraftMasks   the interfaces between guessing and verifying
    NGramDrafter          proposes the tokens that followed the last occurrence of the request's latest tokens
    allot                 gives each row of a step as many drafts as make its tokens cheaper than without drafts
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.types.scheduling import StepTimes
from jaxserve.types.step import Request


class Drafter(Protocol):
    """Guesses tokens. One drafter serves all requests of an engine."""

    def propose(self, request: Request, most: int) -> list[int]:
        """Return at most `most` tokens that are likely to follow a request's known tokens; [] without a guess."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended. The request may be unknown."""
        ...


class DraftMasks(Protocol):
    """The token masks of requests, as far as drafts need them."""

    def forced(self, request_id: str, most: int) -> list[int]:
        """Return at most `most` tokens that the request's grammar prescribes after its known tokens."""
        ...

    def allow(self, request_id: str, drafts: list[int]) -> list[int]:
        """Return the first drafts that the mask allows, and keep the masks after each of them for the next step."""
        ...


ALWAYS_INDEXED = 64  # a call with at most so many new tokens indexes all of them, whatever the rate
MAX_COMPARED = 8  # earlier occurrences that are compared for the longest match
MAX_INDEXED = 4096  # tokens that one call adds to an index; 0.4 us each
INDEXED_PER_SECOND = 250_000  # of all requests together: a tenth of the thread's time


class NGramIndex:
    """The occurrences of each n-gram in one sequence, latest first.

    smallest: number of tokens that must match. largest: number of tokens beyond which a longer match is not better
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest = smallest
        self._largest = largest
        self._tokens: list[int] = []
        self._latest: dict[int, int] = {}  # hash of an n-gram -> index of the token after its last occurrence
        self._earlier: list[int] = []  # by index: the index after the occurrence before it; 0: none

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
        """Return at most `most` tokens that followed the longest match of the sequence's end.

        Of equally long matches the latest counts. A match that reaches the end is a repetition; the drafts repeat it.
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


FIRST_RATE = 0.3  # assumed before any draft was compared: one right draft is enough to begin
MEMORY = 16  # a row's rate is the average of so many drafts
WORTH = 1.1  # the least gain: a step with drafts is read before the next one is made, which costs time too
LEAST = 0.05  # a draft that is right less often is not worth its place in a step
UNTIMED_COST = 0.05  # cost of each draft in plain steps, if no step was timed


@dataclass(slots=True)
class DraftRecord:
    """The drafts of one request and how often they were right.

    drafts     the latest ones, for the tokens from position `position` on
    rate       share of the drafts that were right; one after a wrong draft does not count
    worth_at   tokens of the output when the device was asked for some of them, because they were worth it
    """

    rate: float = FIRST_RATE
    drafts: list[int] = field(default_factory=list)
    position: int = -1
    num_compared: int = 0
    worth_at: int = 0

    def compare(self, position: int, token_ids: Sequence[int]) -> None:
        """Update `rate` by the output's tokens from `position` on, if the drafts are for that position.

        It does not matter whether the drafts were computed in a step or only guessed.
        """
        if position != self.position:
            return
        for draft, token in zip(self.drafts, token_ids, strict=False):
            self.num_compared += 1
            weight = max(1 / MEMORY, 1 / (1 + self.num_compared))
            self.rate += weight * ((draft == token) - self.rate)
            if draft != token:
                return


def allot(
    num_rows: int,
    offers: Sequence[tuple[float, int]],
    sizes: Sequence[int],
    times: StepTimes,
    seconds_before: float = 0,
) -> list[int] | None:
    """Return how many of its drafts each offer gets in a step of `num_rows` rows; None if no drafts are better.

    offers: (rate, number of drafts). sizes: tokens of a step with drafts, ascending; half as many rows fit.
    seconds_before: seconds that the device needs before the step, to propose the drafts

    The i-th draft of an offer is right with probability rate**i. For each size the likeliest drafts are taken, and the
    size that yields the most tokens a second is compared with a step without drafts.
    """
    gains = [
        (gain, i)
        for i, (rate, count) in enumerate(offers)
        for gain in itertools.takewhile(lambda gain: gain >= LEAST, (rate**place for place in range(1, count + 1)))
    ]
    gains.sort(reverse=True)
    plain = times.decode_seconds(num_rows) or 1.0
    best, taken = WORTH * num_rows / plain, 0
    total, done = float(num_rows), 0
    for size in sizes:
        if not gains or size < 2 * num_rows:
            continue
        count = min(size - num_rows, len(gains))
        total, done = total + sum(gain for gain, _ in gains[done:count]), count
        seconds = times.verify_seconds(size) or plain * (1 + UNTIMED_COST * (size - num_rows))
        seconds += seconds_before
        if total / seconds > best:
            best, taken = total / seconds, count
        if count == len(gains):
            break
    if not taken:
        return None
    counts = [0] * len(offers)
    for _, i in gains[:taken]:
        counts[i] += 1
    return counts
