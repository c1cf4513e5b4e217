"""Stop strings and patterns: the same result however the text is cut, nothing leaked, nothing lost."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidValueError
from jaxserve.text.stop import LOOK_BACK, MAX_INSTRUCTIONS, StopChecker, StopPatterns, Stops


def run(checker: StopChecker, deltas: list[str]) -> tuple[str, str | None]:
    out = ""
    for delta in deltas:
        text, matched = checker.push(delta)
        out += text
        if matched is not None:
            return out, matched
    return out + checker.flush(), None


def strings(*stops: str, include: bool = False) -> StopChecker:
    return StopChecker(Stops(stops), include=include)


def patterns(*sources: str) -> StopChecker:
    return StopChecker(Stops((), StopPatterns(sources)))


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
    assert run(strings(*stops, include=include), cut(text, sizes)) == expected(text, stops, include)


def test_a_prefix_of_a_stop_is_held_and_released() -> None:
    checker = strings("<|end|>")
    assert checker.push("a<|e") == ("a", None)
    assert checker.push("x") == ("<|ex", None)
    assert checker.push("<|end") == ("", None)
    assert checker.push("|>tail") == ("", "<|end|>")
    assert checker.push("more") == ("", "<|end|>")
    assert checker.flush() == ""


def test_ignored_text_can_neither_match_nor_begin_a_match() -> None:
    checker = strings("END")
    assert checker.push("END E", ignore=True) == ("END E", None)
    assert checker.push("ND") == ("ND", None)
    assert checker.push("END") == ("", "END")


def test_the_first_end_counts_and_then_the_string() -> None:
    checker = StopChecker(Stops(["END"], StopPatterns(["E+N"])))
    assert checker.push("xEND") == ("xEN", "E+N")
    checker = StopChecker(Stops(["END"], StopPatterns(["ND+"])))
    assert checker.push("xEND") == ("x", "END")


def test_a_pattern_ends_the_output_behind_text_that_was_held_for_a_string() -> None:
    checker = StopChecker(Stops(["abcd"], StopPatterns(["b[x-z]"])))
    assert checker.push("-ab") == ("-", None)
    assert checker.push("y!") == ("aby", "b[x-z]")


def first_match(text: str, pattern: str) -> tuple[str, str | None]:
    """By definition: the output ends where the first match ends."""
    for end in range(1, len(text) + 1):
        if any(re.fullmatch(pattern, text[start:end]) for start in range(end)):
            return text[:end], pattern
    return text, None


PATTERNS = [r"a+b", r"(ab|ba){2}", r"[^a]b?a", r"\n\n+", r"a(?:b|\n)*a", r"b{2,3}", r"(?i)A.B", r"[\]a-]b\n", "(a*)+b"]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text("ab\n", max_size=14), sizes=st.lists(st.integers(0, 5), max_size=6))
def test_patterns_equal_python_re(pattern: str, text: str, sizes: list[int]) -> None:
    assert run(patterns(pattern), cut(text, sizes)) == first_match(text, pattern)


@given(st.text("é€😀ab", max_size=20), st.lists(st.integers(0, 3), max_size=8))
def test_a_match_of_long_characters_ends_between_two(text: str, sizes: list[int]) -> None:
    assert run(patterns("€.a?b"), cut(text, sizes)) == first_match(text, "€.a?b")


@pytest.mark.parametrize(
    ("pattern", "deltas", "out"),
    [
        ("^b", ["a", "b"], None),
        ("^b", ["b", "c"], "b"),
        ("a$", ["xa b", "ca", "z"], "xa bca"),
        (r"\bfoo", ["xfoo ", "foo"], "xfoo foo"),
        ("^b", ["a" * LOOK_BACK, "a", "b"], None),  # the look-back begins in the middle of the output
        (rf"\ba{{{LOOK_BACK}}}b", ["x" + "a" * LOOK_BACK, "b"], None),
    ],
)
def test_anchors(pattern: str, deltas: list[str], out: str | None) -> None:
    assert run(patterns(pattern), deltas) == ("".join(deltas) if out is None else out, out and pattern)


def test_skipped_text_is_no_part_of_a_match() -> None:
    checker = patterns("ab", "^c")
    assert checker.push("xa", ignore=True) == ("xa", None)
    assert checker.push("b") == ("b", None)
    assert checker.push("c") == ("c", None)


@pytest.mark.parametrize(
    "pattern",
    ["", "a*", "^", r"(a)\1", "(?=a)b", "(?<!a)b", "(a", "a)", "[a", "*a", "a**", "a{3,1}", "a" * 300,
     "(a{999}){999}", r"\q", "a++", "[z-a]", r"a\Z", r"(?:\pL{50}){20}x"],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        StopPatterns([pattern])
    assert caught.value.param == "stop_regex"


def test_the_length_of_the_patterns_is_limited_over_all_choices() -> None:
    assert StopPatterns(["[ab]*a[ab]{100}x"], num_choices=8)
    with pytest.raises(InvalidValueError, match="with 128 choices they may be 64"):
        StopPatterns(["[ab]*a[ab]{100}x"], num_choices=128)
    with pytest.raises(InvalidValueError, match=f"may be {MAX_INSTRUCTIONS}"):
        StopPatterns([f"{letter}{{900}}x" for letter in "abcdefghij"])


@pytest.mark.parametrize("pattern", ["(a+)+c", "(a|a)*c", r"(?:.?){500}\x00", "[ab]*a[ab]{200}x"])
def test_a_push_costs_the_same_however_long_the_text_is(pattern: str) -> None:
    checker = patterns(pattern)
    out, matched = run(checker, ["ab", "ba", "aa"] * 1000)
    assert (len(out), matched) == (6000, None)
    start = time.thread_time()
    for delta in ["ab", "ba", "aa"] * 10:
        checker.push(delta)
    assert (time.thread_time() - start) / 30 < 10e-3  # the last one, which leaves RE2 no states to keep, takes 0.3 ms


def test_many_stops_cost_little() -> None:
    checker = strings(*(f"stop number {n}" for n in range(32)))
    start = time.thread_time()
    for _ in range(10_000):
        checker.push("stop")
    assert (time.thread_time() - start) / 10_000 < 50e-6


def test_choices_share_the_stops_of_their_request() -> None:
    stops = Stops(["END"], StopPatterns(["Q+:"]))
    first, second = StopChecker(stops), StopChecker(stops)
    assert first.push("EN") == ("", None)
    assert second.push("D Q") == ("D Q", None)
    assert first.push("D") == ("", "END")
    assert second.push(":") == (":", "Q+:")
