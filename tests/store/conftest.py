"""A store in a temporary directory, with a clock that stands."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.store import Store
from tests.store.helpers import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    store = Store(tmp_path / "store", clock=clock)
    yield store
    asyncio.run(store.close())
