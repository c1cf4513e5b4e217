"""Durations of the served model's steps by size, as measured in the warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NEARLY = 0.9  # share of the highest throughput that counts as nearly all of it


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per step of the programs that were timed. Both tables may be empty.

    decode     decode rows -> seconds
    prefill    tokens of a step with a prompt -> seconds
    verify     tokens of a step with drafts -> seconds
    """

    decode: Mapping[int, float]
    prefill: Mapping[int, float]
    verify: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, decode: Mapping[int, float], prefill: Mapping[int, float], verify: Mapping[int, float] | None = None
    ) -> StepTimes:
        """Build the tables from one measurement per size. Removes noise: no size takes longer than a larger one."""
        return cls(_rising(decode), _rising(prefill), _rising(verify or {}))

    def like(self, whole: StepTimes) -> StepTimes:
        """Return these times with prefill as slow as in `whole`, which has the largest size of the same programs.

        Steps without rows have no attention, which is a part of a prefill and hardly any of a decode step.
        """
        largest = max(self.prefill, default=0)
        if not self.prefill.get(largest) or largest not in whole.prefill:
            return self
        factor = max(1.0, whole.prefill[largest] / self.prefill[largest])
        return StepTimes(self.decode, {size: factor * taken for size, taken in self.prefill.items()}, self.verify)

    def decode_seconds(self, rows: int) -> float:
        """Return the seconds of a step with `rows` decode rows; 0 if nothing was timed."""
        return _seconds(self.decode or self.prefill, rows)

    def verify_seconds(self, tokens: int) -> float:
        """Return the seconds of a step with drafts of `tokens` tokens; 0 if nothing was timed."""
        return _seconds(self.verify, tokens)

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds of the steps that compute so many prompt tokens; 0 if nothing was timed."""
        return _seconds(self.prefill, tokens)

    def full_rows(self, most: int) -> int:
        """Return the fewest decode rows whose throughput is NEARLY that of the best number of rows up to `most`.

        Returns `most` if no decode step of up to `most` rows was timed.
        """
        speeds = {rows: rows / seconds for rows, seconds in self.decode.items() if seconds > 0 and rows <= most}
        return min((rows for rows in speeds if speeds[rows] >= NEARLY * max(speeds.values())), default=most)

    def tokens_within(self, seconds: float) -> int | None:
        """Return the most tokens of a step with a prompt that finishes within the given seconds.

        At least the smallest size; None if nothing was timed.
        """
        if not self.prefill:
            return None
        largest = max(self.prefill)
        if seconds > self.prefill[largest] > 0:
            return int(largest * seconds / self.prefill[largest])
        return max((size for size, taken in self.prefill.items() if taken <= seconds), default=min(self.prefill))


def _rising(table: Mapping[int, float]) -> dict[int, float]:
    return {size: min(taken for other, taken in table.items() if other >= size) for size in sorted(table)}


UNTIMED = StepTimes({}, {})


def _seconds(table: Mapping[int, float], count: int) -> float:
    """Return the seconds of the smallest size that holds `count`; proportionally more beyond the largest size."""
    if not table:
        return 0.0
    largest = max(table)
    if count > largest:
        return table[largest] * count / largest
    return table[min(size for size in table if size >= count)]
