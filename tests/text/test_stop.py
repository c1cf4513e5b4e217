"""Stop strings and patterns: the same result however the text is cut, nothing leaked, nothing lost."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidValueError
from jaxserve.text.patterns import MAX_MATCH_CHARS, compile_patterns
from jaxserve.text.stop import StopChecker


def run(checker: StopChecker, deltas: list[str]) -> tuple[str, str | None]:
    out = ""
    for delta in deltas:
        text, matched = checker.push(delta)
        out += text
        if matched is not None:
            return out, matched
    return out + checker.flush(), None


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the first end of any stop; the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def cut(text: str, sizes: list[int]) -> list[str]:
    deltas, at = [], 0
    for size in sizes:
        deltas.append(text[at : at + size])
        at += size
    return [*deltas, text[at:]]


letters = st.text("ab\n", max_size=12)


@given(text=st.text("ab\n", max_size=40), stops=st.lists(letters, max_size=4), include=st.booleans(),
       sizes=st.lists(st.integers(0, 5), max_size=10))  # fmt: skip
def test_strings_equal_the_definition(text: str, stops: list[str], include: bool, sizes: list[int]) -> None:
    assert run(StopChecker(stops, include=include), cut(text, sizes)) == expected(text, stops, include)


def test_a_prefix_of_a_stop_is_held_and_released() -> None:
    checker = StopChecker(["<|end|>"])
    assert checker.push("a<|e") == ("a", None)
    assert checker.push("x") == ("<|ex", None)
    assert checker.push("<|end") == ("", None)
    assert checker.push("|>tail") == ("", "<|end|>")
    assert checker.push("more") == ("", "<|end|>")
    assert checker.flush() == ""


def test_ignored_text_can_neither_match_nor_begin_a_match() -> None:
    checker = StopChecker(["END"], compile_patterns(["E+N"]))
    assert checker.push("EN") == ("", "E+N")
    checker = StopChecker(["END"])
    assert checker.push("END E", ignore=True) == ("END E", None)
    assert checker.push("ND") == ("ND", None)
    assert checker.push("END") == ("", "END")


def first_match(text: str, pattern: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for start in range(end):
            if re.fullmatch(pattern, text[start:end]):
                return text[:start], pattern
    return text, None


PATTERNS = [r"a+b", r"(ab|ba){2}", r"[^a]b?a", r"\n\n+", r"a(?:b|\n)*a", r"b{2,3}", r"(?i)A.B", r"[\]a-]b\n", "(a*)+b"]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text("ab\n", max_size=14), sizes=st.lists(st.integers(0, 5), max_size=6))
def test_patterns_equal_python_re(pattern: str, text: str, sizes: list[int]) -> None:
    assert run(StopChecker([], compile_patterns([pattern])), cut(text, sizes)) == first_match(text, pattern)


@pytest.mark.parametrize(
    "pattern",
    ["", "a*", "^a", "a$", r"\bfoo", r"(a)\1", "(?=a)b", "(?<!a)b", "(a", "a)", "[a", "*a", "a**", "a{3,1}", "a" * 300,
     "(" * 100 + "a" + ")" * 100, "(a{999}){999}", r"\q", "(?P<n>a)", "a++", "[z-a]"],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        compile_patterns([pattern])
    assert caught.value.param == "stop_regex"


def test_time_is_linear_for_a_pattern_that_backtracks() -> None:
    checker = StopChecker([], compile_patterns(["(a+)+b", "(a|a)*c"]))
    start = time.perf_counter()
    out, matched = run(checker, ["a"] * 5000)
    assert (out, matched) == ("a" * 5000, None)
    assert time.perf_counter() - start < 2


def test_held_text_is_bounded() -> None:
    checker = StopChecker([], compile_patterns(["a.*b"]))
    given_out = "".join(checker.push("a" + "x" * 99)[0] for _ in range(50))
    assert len(given_out) >= 5000 - MAX_MATCH_CHARS


def test_many_stops_cost_little() -> None:
    checker = StopChecker([f"stop number {n}" for n in range(32)])
    start = time.perf_counter()
    for _ in range(10_000):
        checker.push("stop")
    assert (time.perf_counter() - start) / 10_000 < 50e-6
