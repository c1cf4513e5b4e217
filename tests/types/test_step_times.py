"""How long a step takes, and how many tokens a time allows."""

from jaxserve.types.scheduling import UNTIMED, StepTimes

TIMES = StepTimes({1: 1.0, 8: 2.0}, {8: 4.0, 32: 10.0})


def test_a_step_takes_the_time_of_the_size_that_holds_it() -> None:
    assert [TIMES.decode_seconds(rows) for rows in (0, 1, 2, 8)] == [1.0, 1.0, 2.0, 2.0]
    assert [TIMES.prefill_seconds(tokens) for tokens in (1, 8, 9, 32)] == [4.0, 4.0, 10.0, 10.0]


def test_beyond_the_largest_size_time_grows_with_the_tokens() -> None:
    assert TIMES.decode_seconds(16) == 4.0 and TIMES.prefill_seconds(64) == 20.0


def test_the_most_tokens_in_a_time() -> None:
    assert [TIMES.tokens_within(seconds) for seconds in (1.0, 4.0, 9.9, 10.0, 15.0)] == [8, 8, 8, 32, 48]


def test_what_was_not_timed() -> None:
    assert UNTIMED.tokens_within(1.0) is None
    assert UNTIMED.decode_seconds(8) == UNTIMED.prefill_seconds(8) == 0.0
    assert StepTimes({}, {8: 4.0}).decode_seconds(8) == 4.0


def test_a_disturbed_measurement_takes_no_longer_than_that_of_a_larger_size() -> None:
    times = StepTimes.of({4: 3.0, 1: 1.0, 2: 9.0}, {64: 7.0, 32: 300.0, 8: 2.0})
    assert times == StepTimes({1: 1.0, 2: 3.0, 4: 3.0}, {8: 2.0, 32: 7.0, 64: 7.0})


def test_the_rows_that_fill_a_step() -> None:
    """With 32 rows 91 % of the tokens a second that 64 bring."""
    times = StepTimes({1: 1.0, 8: 2.0, 32: 3.5, 64: 6.4}, {})
    assert [times.full_rows(most) for most in (64, 32, 8, 4)] == [32, 32, 8, 1]
    assert UNTIMED.full_rows(64) == 64
