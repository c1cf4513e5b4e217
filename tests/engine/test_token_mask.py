"""Bitmasks from bad words and grammars."""

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.engine.request import SamplingParams, ScheduledRow, SchedulerOutput
from jaxserve.engine.token_mask import MaskTable, Matcher, TokenMask
from tests.fakes import CountingMatcher


def banned(mask: TokenMask, vocab: int = 70) -> list[int]:
    row = np.full(-(-vocab // 32), -1, np.int32)
    mask.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab]
    return np.flatnonzero(bits == 0).tolist()


def bad_words(*words: tuple[int, ...]) -> TokenMask:
    mask = TokenMask.of(SamplingParams(bad_words_token_ids=words), None)
    assert mask is not None
    return mask


def test_an_unconstrained_request_has_no_mask() -> None:
    assert TokenMask.of(SamplingParams(bad_words_token_ids=((5,),)), None) is None, "one token: the device's"


def test_the_last_token_of_a_bad_word_is_banned_after_the_ones_before_it() -> None:
    mask = bad_words((1, 2, 31), (2, 63), (9,))
    assert banned(mask) == []
    mask.accept([1])
    assert banned(mask) == []
    mask.accept([2])
    assert banned(mask) == [31, 63]
    mask.accept([5])
    assert banned(mask) == []
    mask.accept([7, 1, 2])
    assert banned(mask) == [31, 63]


def test_a_word_of_one_token_again_and_again() -> None:
    mask = bad_words((4, 4))
    mask.accept([4])
    assert banned(mask) == [4]


def test_bad_words_and_a_grammar_hold_together() -> None:
    mask = TokenMask.of(SamplingParams(bad_words_token_ids=((3, 6),)), CountingMatcher(modulus=3, length=2))
    assert mask is not None
    assert mask.accept([3]) and not mask.is_terminated
    assert 6 in banned(mask) and 9 not in banned(mask) and 1 in banned(mask)
    assert not mask.accept([7])
    assert mask.accept([9]) and mask.is_terminated


class FailingMatcher(CountingMatcher):
    def fill(self, bitmask_row: np.ndarray) -> None:
        raise ValueError("limit")


def table_of(matchers: Sequence[Matcher], together: bool, calls: list[int]) -> MaskTable:
    def fill_rows(rows: Sequence[tuple[Matcher, int]], bits: np.ndarray) -> None:
        calls.append(len(rows))
        for matcher, row in rows:
            bits[row] = 0  # what a fill that breaks off leaves behind
            bits[row] = -1
            matcher.fill(bits[row])

    table = MaskTable(70, fill_rows if together else None)
    for number, matcher in enumerate(matchers):
        words = ((number % 70,) * 2,)
        mask = TokenMask(matcher, words)
        mask.accept([0])
        table.add(str(number), mask)
    return table


def step_of(count: int) -> SchedulerOutput:
    rows = [ScheduledRow(str(i), i, 0, 1, True, [], 0, [], masked=i != 2) for i in range(count)]
    return SchedulerOutput(0, rows, count, [])


@pytest.mark.parametrize("count", [1, 3, 8])
def test_rows_filled_together_equal_rows_filled_alone(count: int) -> None:
    calls: list[int] = []
    together, alone = (
        table_of([CountingMatcher(modulus=i % 3 + 2, length=9) for i in range(count)], way, calls).bitmask(
            step_of(count)
        )
        for way in (True, False)
    )
    assert (together[0] == alone[0]).all() and together[1] == alone[1] == []
    assert calls == ([count - 1] if count == 8 else []), "few rows wake no threads"


def test_one_failing_matcher_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    matchers = [FailingMatcher(2, 9) if i == 5 else CountingMatcher(2, 9) for i in range(8)]
    bits, failed = table_of(matchers, True, []).bitmask(step_of(8))
    assert failed == ["5"] and (bits[5] == -1).all()
    assert (bits[[0, 1, 3, 4, 6, 7]] != -1).any(axis=1).all()
