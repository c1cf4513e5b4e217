"""Bitmasks from bad words and grammars."""

import logging
import time
from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.grammar.matcher import MatcherFactory
from jaxserve.grammar.token_mask import TokenMask
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import GrammarSpec, SamplingParams
from jaxserve.types.step import MaskBudget
from tests.fake_grammar import CountingMatcher


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
    assert mask.advance([4], "r") is None, "bad words end no output"
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


@pytest.mark.parametrize("bad_words", [[], [(300, 301)]])
def test_masks_after_drafts_are_those_after_tokens(
    factory: MatcherFactory, tokenizer: Tokenizer, bad_words: list[tuple[int, ...]]
) -> None:
    """At every place of an output, with drafts that become wrong after some tokens. Drafts leave no trace."""
    properties = '{"name": {"enum": ["abc"]}, "n": {"type": "integer"}}'
    schema = f'{{"type": "object", "properties": {properties}, "additionalProperties": false}}'
    output = tokenizer.encode('{"name": "abc", "n": 17}', add_special_tokens=False)
    ahead, plain = (TokenMask(factory(GrammarSpec(kind="json_schema", source=schema)), bad_words) for _ in range(2))
    expected = []
    for token in output:
        row = np.full(10, -1, np.int32)
        plain.fill(row)
        expected.append(row)
        assert plain.accept([token])
    assert plain.is_terminated
    for i in range(len(output)):
        drafts = [*output[i : i + 5], output[0], output[0]]
        rows = np.full((len(drafts), 10), -1, np.int32)
        count = ahead.fill_ahead(drafts, rows, "r")
        assert count == min(5, len(output) - i - 1), "the token that completes the grammar is no draft"
        np.testing.assert_array_equal(rows[:count], np.array(expected)[i + 1 : i + 1 + count])
        now = np.full(10, -1, np.int32)
        ahead.fill(now)
        np.testing.assert_array_equal(now, expected[i])
        assert ahead.accept([output[i]])
    assert ahead.is_terminated and ahead.error is None


def test_a_matcher_that_fails_on_drafts_allows_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    class Failing(CountingMatcher):
        def prefix(self, token_ids: Sequence[int]) -> int:
            raise ValueError("limit")

    mask, rows = TokenMask(Failing(2, 9), [(4, 4)]), np.full((2, 3), -1, np.int32)
    assert mask.accept([4]) and mask.fill_ahead([2, 4], rows, "r") == 0
    assert (rows == -1).all() and 4 in banned(mask), "the mask is as before"


def test_what_a_grammar_prescribes_is_a_draft(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    """The tokens of a text that cannot be another."""
    schema = '{"type": "object", "properties": {"abcdefg": {"const": 1}}, "required": ["abcdefg"]}'
    mask = TokenMask(factory(GrammarSpec(kind="json_schema", source=schema)), [])
    assert mask.accept(tokenizer.encode('{"', add_special_tokens=False))
    forced = mask.forced("r")
    rows = np.full((len(forced), 10), -1, np.int32)
    assert len(forced) >= 2 and mask.fill_ahead(forced, rows, "r") == len(forced)
    assert TokenMask(None, [(1, 2)]).forced("r") == []


def test_no_drafts_before_the_grammar_begins(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    """Tokens there cannot be taken back quickly."""
    marker = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    mask = TokenMask(factory(GrammarSpec(kind="regex", source="[0-9]+", begin_after=marker)), [])
    assert mask.fill_ahead([5, 6], np.full((2, 10), -1, np.int32), "r") == 0 and mask.forced("r") == []


def test_drafts_earn_no_budget(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    mask = TokenMask(factory(GrammarSpec(kind="regex", source="[0-9]+")), [])
    digit = tokenizer.encode("7", add_special_tokens=False)[-1]
    before = mask.budget._left
    for _ in range(20):
        assert mask.fill_ahead([digit] * 5, np.full((5, 10), -1, np.int32), "r") == 5
    assert mask.budget._left < before
