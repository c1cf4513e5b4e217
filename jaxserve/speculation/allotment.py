"""How many drafts each row of a step is given: as many as make the step's tokens cheaper than without drafts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.types.scheduling import StepTimes

FIRST_RATE = 0.3  # assumed before any draft was compared: one right draft is enough to begin
MEMORY = 16  # drafts that a row's rate is an average of
WORTH = 1.1  # the least gain: a step with drafts is read before the next one is made, which costs time too
LEAST = 0.05  # a draft that is right less often is not worth its place in a step
UNTIMED_COST = 0.05  # of each draft, in plain steps, if no step was timed


@dataclass(slots=True)
class DraftRecord:
    """The drafts of one request and how often they were right.

    drafts     the latest ones, for the tokens from position `position` on
    rate       share of the drafts that were right; one after a wrong draft does not count
    """

    rate: float = FIRST_RATE
    drafts: list[int] = field(default_factory=list)
    position: int = -1
    num_compared: int = 0

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
    num_rows: int, offers: Sequence[tuple[float, int]], sizes: Sequence[int], times: StepTimes
) -> list[int] | None:
    """Return how many of its drafts each offer gets in a step of `num_rows` rows; None: better a step without drafts.

    offers: (rate, number of drafts). sizes: tokens of a step with drafts, ascending; half as many rows fit.

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
