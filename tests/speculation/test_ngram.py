"""N-gram drafts, compared with a plain search."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.speculation.ngram import MAX_INDEXED, NGramDrafter, NGramIndex
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason, Request
from tests.fakes import VOCAB, make_core, make_request, run_all, small_config


def searched(tokens: list[int], smallest: int, largest: int, most: int) -> list[int]:
    """What followed the longest match of the end of `tokens`, the latest of equal ones."""

    def match(end: int) -> int:
        length = 0
        while length < min(end, largest) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    lengths = {end: match(end) for end in range(1, len(tokens))}
    good = [end for end in lengths if lengths[end] >= smallest]
    if not good:
        return []
    best = max(good, key=lambda end: (lengths[end], end))
    text = list(tokens)
    for i in range(most):
        text.append(text[best + i])
    return text[len(tokens) :]


@given(
    st.lists(st.integers(0, 3), max_size=24), st.integers(1, 3), st.integers(0, 4), st.integers(1, 6), st.integers(1, 9)
)
def test_drafts_are_those_of_a_search(tokens: list[int], smallest: int, more: int, most: int, step: int) -> None:
    """Short texts of few tokens have at most as many matches as are compared."""
    index = NGramIndex(smallest, smallest + more)
    for first in range(0, len(tokens), step):
        index.extend(tokens[first : first + step])
    found = index.propose(most)
    expected = searched(tokens, smallest, smallest + more, most)
    assert bool(found) == bool(expected)
    if sum(tokens[i : i + smallest] == tokens[-smallest:] for i in range(len(tokens) - smallest)) <= 8:
        assert found == expected


def test_a_repetition_goes_on() -> None:
    index = NGramIndex(2, 4)
    index.extend([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert index.propose(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_long_prompt_takes_several_calls() -> None:
    prompt = [random.Random(0).randrange(50_000) for _ in range(3 * MAX_INDEXED)]
    prompt += prompt[100:110]
    now = iter(range(100))
    drafter = NGramDrafter(3, 8, clock=lambda: float(next(now)))
    request = Request("a", prompt, SamplingParams(), 0.0, 0, 9)
    assert [drafter.propose(request, 4) for _ in range(3)] == [[], [], []]
    assert drafter.propose(request, 4) == prompt[110:114]
    request.output_token_ids += prompt[110:112]
    assert drafter.propose(request, 2) == prompt[112:114]
    drafter.forget("a")
    assert drafter.propose(request, 2) == []


@pytest.mark.parametrize("tokens", [[], [1], [1, 1]])
def test_too_short_a_text_has_no_drafts(tokens: list[int]) -> None:
    index = NGramIndex(2, 4)
    index.extend(tokens)
    assert index.propose(3) == []


def test_many_long_prompts_take_a_tenth_of_the_time() -> None:
    drafter = NGramDrafter(3, 8, clock=lambda: 0.0)
    requests = [Request(f"{i}", [i] * 4000, SamplingParams(), 0.0, 0, 9) for i in range(10)]
    assert [bool(drafter.propose(request, 4)) for request in requests] == [True, *[False] * 9]


class Keeping:
    """A drafter that proposes nothing, and shows of which requests it keeps something."""

    def __init__(self) -> None:
        self.kept: set[str] = set()

    def propose(self, request: Request, most: int) -> list[int]:
        self.kept.add(request.request_id)
        return []

    def forget(self, request_id: str) -> None:
        self.kept.discard(request_id)


def test_nothing_is_kept_of_a_request_that_ended() -> None:
    """Some end by a stop token while the next step of others is in flight."""
    drafter = Keeping()
    config = small_config(max_drafts=3, verify_sizes=(8,), num_pages=400)
    core = make_core(config, eos_token_ids=tuple(range(0, VOCAB, 7)), drafter=drafter)
    transcripts = run_all(core, [make_request(f"r{i}", [i] * 9, max_tokens=30) for i in range(30)])
    assert sum(each.reason is FinishReason.STOP for each in transcripts.values()) > 20
    assert not drafter.kept
