"""When drafts are worth a place in a step, and how many."""

from __future__ import annotations

import pytest

from jaxserve.speculation.ngram import FIRST_RATE, DraftRecord, allot
from jaxserve.types.scheduling import UNTIMED, StepTimes

SIZES = (2, 4, 8, 16, 32)
FLAT = StepTimes({1: 1.0, 8: 1.2}, {}, dict.fromkeys(SIZES, 1.3))  # reading the weights takes all the time
STEEP = StepTimes({1: 1.0, 8: 8.0}, {}, {size: float(size) for size in SIZES})  # every token costs as much


@pytest.mark.parametrize(
    ("num_rows", "offers", "times", "counts"),
    [
        (1, [(0.9, 7)], FLAT, [7]),
        (1, [(0.1, 7)], FLAT, None),
        (1, [(0.99, 7)], STEEP, None),
        (1, [(1.0, 1)], FLAT, [1]),
        (1, [], FLAT, None),
        (8, [(0.9, 7)], FLAT, [7]),
        (8, [(0.9, 7), (0.05, 7)], FLAT, [7, 1]),
        (8, [(0.9, 7)] * 8, STEEP, None),
        (17, [(1.0, 7)], FLAT, None),  # no size has room for so many rows
        (1, [(0.9, 7)], UNTIMED, [7]),
        (1, [(0.01, 7)], UNTIMED, None),
    ],
)
def test_allotment(num_rows: int, offers: list[tuple[float, int]], times: StepTimes, counts: list[int] | None) -> None:
    assert allot(num_rows, offers, SIZES, times) == counts


def test_a_step_takes_the_likeliest_drafts() -> None:
    times = StepTimes({4: 1.0}, {}, {8: 1.1, 16: 9.0, 32: 9.0})
    assert allot(4, [(0.5, 7), (0.9, 7), (0.8, 7)], SIZES, times) == [0, 3, 1]


def test_one_right_draft_opens_the_gate_and_wrong_ones_close_it() -> None:
    record = DraftRecord()
    costly = StepTimes({1: 1.0}, {}, dict.fromkeys(SIZES, 1.5))

    def worth() -> bool:
        return allot(1, [(record.rate, 7)], SIZES, costly) is not None

    assert record.rate == FIRST_RATE and not worth()
    record.position, record.drafts = 10, [1, 2, 3]
    record.compare(10, [1])
    assert worth()
    for position in range(11, 20):
        record.position, record.drafts = position, [5, 6]
        record.compare(position, [4])
    assert not worth() and record.num_compared == 10


def test_drafts_are_compared_with_tokens_of_their_position_only() -> None:
    record = DraftRecord(position=4, drafts=[1, 2, 9, 9])
    record.compare(5, [1])
    assert record.num_compared == 0
    record.compare(4, [1, 2, 3, 9])
    assert record.num_compared == 3  # what follows a wrong draft says nothing
