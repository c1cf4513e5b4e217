"""Bitmasks from bad words and grammars."""

import time

import numpy as np

from jaxserve.grammar.token_mask import TokenMask
from jaxserve.types.mask_budget import MaskBudget
from jaxserve.types.sampling import SamplingParams
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


def test_what_masks_cost_is_charged_in_cpu_time() -> None:
    class Slow(CountingMatcher):
        def fill(self, bitmask_row: np.ndarray) -> None:
            began = time.thread_time()
            while time.thread_time() - began < 0.05:
                pass

    mask = TokenMask(Slow(2, 9), (), budget := MaskBudget())
    budget.charge(MaskBudget.SECONDS - 0.2)
    fills = 0
    while budget.error is None:
        mask.fill(np.full(3, -1, np.int32))
        fills += 1
    assert not mask.is_quick and 2 <= fills <= 5
