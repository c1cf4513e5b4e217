"""A store in a temporary directory, with a clock that stands."""

import asyncio
import subprocess
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


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB that can really be full."""
    path = tmp_path / "store"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
