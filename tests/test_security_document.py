"""SECURITY.md names a test for each promise. The tests are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROMISES = re.findall(r"`(tests/[^`:]*)::(\w+)`", (ROOT / "SECURITY.md").read_text())


def test_promises_are_found() -> None:
    assert len(PROMISES) > 20


@pytest.mark.parametrize(("file", "name"), PROMISES)
def test_the_test_of_a_promise_is_there(file: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
