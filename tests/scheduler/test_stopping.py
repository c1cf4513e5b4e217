"""The end of a request by its own tokens, and by the clock."""

import pytest

from jaxserve.scheduler.stopping import Timers, end_of
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason, Request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("before", "new", "min_tokens", "max_tokens", "expected"),
    [
        ([], [3], 0, 5, (1, None, None)),
        ([3], [7], 0, 5, (1, STOP, 7)),
        ([3, 3, 3, 3], [3], 0, 5, (1, LENGTH, None)),
        ([3, 3, 3, 3], [7], 0, 5, (1, STOP, 7)),
        ([3], [7], 3, 5, (1, None, None)),
        ([3, 3], [7], 3, 5, (1, STOP, 7)),
        ([], [3, 7, 3], 0, 5, (2, STOP, 7)),
        ([], [7, 3, 7], 2, 5, (3, STOP, 7)),
        ([3, 3, 3], [3, 3, 7], 0, 5, (2, LENGTH, None)),
        ([], [3], 0, 0, (0, LENGTH, None)),
        ([], [7], 0, 0, (0, LENGTH, None)),
    ],
)
def test_the_first_end_counts(
    before: list[int],
    new: list[int],
    min_tokens: int,
    max_tokens: int,
    expected: tuple[int, FinishReason | None, int | None],
) -> None:
    params = SamplingParams(min_tokens=min_tokens)
    request = Request("r", [1], params, arrival=0.0, seed=0, max_tokens=max_tokens, stop_token_ids=frozenset({7}))
    request.output_token_ids = before + new
    assert end_of(request, len(new)) == expected


def test_timers_come_due_in_order_and_once() -> None:
    timers = Timers()
    for when, name in ((3.0, "c"), (1.0, "a"), (2.0, "b"), (1.0, "a2")):
        timers.set(when, name)
    assert list(timers.due(0.9)) == []
    assert list(timers.due(2.0)) == ["a", "a2", "b"]
    assert list(timers.due(9.0)) == ["c"]
    assert list(timers.due(9.0)) == []
