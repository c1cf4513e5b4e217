"""Fixtures of the tests of texts."""

from collections.abc import Iterator

import pytest

from tests.waiting import with_quick_collections


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    with with_quick_collections():
        yield
