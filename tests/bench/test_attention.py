"""The attention benchmark: cases as they are written, and a measurement of every kind of width."""

import pytest

from benchmarks.attention import Case, Heads, attention_seconds
from jaxserve.ops.paged_attention import get_backend


@pytest.mark.parametrize(
    ("text", "case"),
    [("32x160", Case(32, 160, 10)), ("1x17", Case(1, 17, 2)), ("8x512x1024", Case(8, 512, 1024))],
)
def test_cases(text: str, case: Case) -> None:
    assert Case.parse(text, 16) == case


def test_a_case_is_measured() -> None:
    seconds = attention_seconds(get_backend("xla", "cpu"), Case(2, 40, 8), Heads(4, 2, 16), layers=1, repeats=2)
    assert seconds > 0
