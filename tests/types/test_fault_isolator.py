"""The search for the request that makes the device fail, over sets of ids."""

import math
import random

import pytest

from jaxserve.types.fault_isolator import DeviceFaultError, FaultIsolator


def search(suspects: FaultIsolator, rows: list[str], bad: set[str]) -> tuple[list[str], int]:
    """Who is found where each step with one of `bad` fails, and after how many failures."""
    culprit, failures = [], 0
    step = rows
    while failures == 0 or suspects:
        if bad & set(step):
            failures += 1
            if (found := suspects.failed(step)) is not None:
                culprit.append(found)
                bad = bad - {found}
        else:
            suspects.succeeded((name, False) for name in step)
        step = list(suspects.quarantined or ())
    return culprit, failures


@pytest.mark.parametrize("count", [2, 3, 8, 33, 64])
def test_one_among_many_is_found_in_the_logarithm_of_their_number(count: int) -> None:
    rows = [f"r{i}" for i in range(count)]
    for name in rows:
        culprit, failures = search(FaultIsolator(), rows, {name})
        assert culprit == [name] and failures <= math.ceil(math.log2(count)) + 3


def test_all_that_are_bad_are_found_and_nobody_else() -> None:
    """Also where they are neighbours, as the choices of one request are."""
    rng = random.Random(0)
    for _ in range(300):
        rows = [f"r{i}" for i in range(rng.randrange(3, 65))]
        first = rng.randrange(len(rows))
        bad = set(rows[first : first + rng.randrange(1, 9)] if rng.random() < 0.5 else rng.sample(rows, 2))
        if bad != set(rows):
            assert set(search(FaultIsolator(), rows, bad)[0]) == bad


def test_a_single_fault_ends_nobody() -> None:
    suspects = FaultIsolator()
    assert suspects.failed(["a", "b"]) is None
    assert suspects and set(suspects.quarantined or ()) == {"a", "b"}
    suspects.succeeded([("a", False), ("b", False)])
    assert suspects  # they were computed again, and have not decoded yet
    suspects.succeeded([("a", False), ("b", False)])
    assert not suspects and suspects.quarantined is None


def test_who_was_not_in_the_step_is_tried_apart() -> None:
    """b and c had not been admitted: they are tried before a is blamed."""
    suspects = FaultIsolator()
    suspects.failed(["a", "b", "c"])
    for expected in ({"a"}, {"b", "c"}):
        assert suspects.failed(["a"]) is None
        assert set(suspects.quarantined or ()) == expected
    suspects.keep({"a"})
    assert suspects.failed(["a"]) == "a" and not suspects


def test_a_step_with_others_in_it_proves_nothing() -> None:
    suspects = FaultIsolator()
    suspects.failed(["a"])
    assert suspects.failed(["a", "x"]) is None and set(suspects.quarantined or ()) == {"a"}
    assert suspects.failed(["a"]) == "a"


@pytest.mark.parametrize("count", [2, 64])
def test_where_all_fail_it_is_the_device(count: int) -> None:
    rows = [f"r{i}" for i in range(count)]
    with pytest.raises(DeviceFaultError):
        search(FaultIsolator(), rows, set(rows))
