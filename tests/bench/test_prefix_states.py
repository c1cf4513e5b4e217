"""What requests compute of a prompt that others began, for models whose prefix cache keeps states sparsely."""

import random

import pytest

from benchmarks.prefix_states import ANSWER, BORDER, QUESTION, RESULT, Sizes, by_scheduler, questions, turns


@pytest.mark.parametrize(("interval", "chunk"), [(512, 512), (2048, 8192), (512, 100)])
def test_a_shared_text_is_computed_up_to_an_interval_once_and_then_up_to_a_border(interval: int, chunk: int) -> None:
    _, second, *later = questions(by_scheduler(Sizes(interval, 64, chunk)), random.Random(0))
    assert second.computed <= QUESTION + interval + BORDER
    assert all(each.computed <= QUESTION + BORDER for each in later)


@pytest.mark.parametrize(("interval", "chunk", "states"), [(512, 512, 64), (2048, 8192, 64), (64, 100, 400)])
def test_a_turn_computes_its_new_tokens_a_border_and_what_the_last_answer_wrote_since_a_state(
    interval: int, chunk: int, states: int
) -> None:
    """A state of an answer is kept if a page is free, so there are enough."""
    _, *later = turns(by_scheduler(Sizes(interval, states, chunk)), random.Random(0))
    assert len(later[-1].prompt) > 7500
    assert all(each.computed <= RESULT + BORDER + min(interval, ANSWER) for each in later)
