"""The measurement of a step's broadcast, with real processes."""

import pytest

from benchmarks import broadcast
from benchmarks.broadcast import measure, steps
from jaxserve.types.group import Execute


def test_every_step_reaches_every_follower_after_it_was_sent() -> None:
    made = [Execute(output) for output in steps(3, 4)]
    send, there = measure(made, 3)
    assert len(send) == len(there) == 4
    assert min(there) > 0 and min(send) > 0


def test_a_row_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    broadcast.main(["--rows", "2", "--hosts", "2", "--steps", "20", "--vocab", "64", "--masks", "2"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["2 rows", "masks of 2 rows"]
    assert all(float(cell) > 0 for row in rows for cell in row[3:])
