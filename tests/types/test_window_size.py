"""How many windowed pages are needed, by counting tokens."""

import pytest

from jaxserve.types.scheduling import WindowSize


@pytest.mark.parametrize("window", [1, 4, 5, 10, 16])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_the_first_page_needed(window: int, page_size: int) -> None:
    size = WindowSize(window, page_size, chunk=8)
    for position in range(1, 100):
        border = (position - 1) // page_size * page_size
        seen = {max(0, token - window + 1) // page_size for token in (border, *range(position, position + 40))}
        assert size.first_needed(position) == min(seen)
        later = size.next_release(position)
        assert later > position and size.first_needed(later - 1) == size.first_needed(position)
        assert position // page_size - size.first_needed(position) < size.decoding


@pytest.mark.parametrize("window", [1, 7, 16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_the_most_pages_of_a_request(window: int, page_size: int, tokens_per_step: int) -> None:
    """A step in flight from any position on and the next one; two chunks while the prompt is computed."""
    size = WindowSize(window, page_size, chunk=10, tokens_per_step=tokens_per_step)
    for new, most in ((2 * tokens_per_step, size.decoding), (20, size.prefilling)):
        counts = [(position + new - 1) // page_size + 1 - size.first_needed(position) for position in range(1, 200)]
        assert max(counts) <= most <= max(counts) + 1
