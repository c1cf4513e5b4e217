"""How many pages of layers are needed that see a window or a chunk, by counting tokens."""

from typing import Literal

import pytest

from jaxserve.types.scheduling import Reach, Span

Kind = Literal["window", "chunk"]


def first_seen(kind: Kind, tokens: int, position: int) -> int:
    seen = [other for other in range(position + 1) if position - other < tokens]
    return min(seen) if kind == "window" else min(o for o in seen if o // tokens == position // tokens)


@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("window", [1, 4, 5, 10, 16])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_the_first_page_needed(kind: Kind, window: int, page_size: int) -> None:
    size = Span(Reach(kind, window), page_size, prompt_tokens=8)
    for position in range(1, 100):
        border = (position - 1) // page_size * page_size
        seen = {first_seen(kind, window, token) // page_size for token in (border, *range(position, position + 40))}
        assert size.first_needed(position) == min(seen)
        later = size.next_release(position)
        assert later > position and size.first_needed(later - 1) == size.first_needed(position)
        assert position // page_size - size.first_needed(position) < size.decoding


@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("window", [1, 7, 16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_the_most_pages_of_a_request(kind: Kind, window: int, page_size: int, tokens_per_step: int) -> None:
    """A step in flight from any position on and the next one; two chunks while the prompt is computed."""
    size = Span(Reach(kind, window), page_size, prompt_tokens=10, tokens_per_step=tokens_per_step)
    for new, most in ((2 * tokens_per_step, size.decoding), (20, size.prefilling)):
        counts = [(position + new - 1) // page_size + 1 - size.first_needed(position) for position in range(1, 200)]
        assert max(counts) <= most
        if kind == "window":
            assert most <= max(counts) + 1
