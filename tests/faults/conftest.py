"""One server in processes of its own for all tests that only load it."""

from collections.abc import Iterator

import pytest

from tests.faults.launched import Launched

QUEUE = 64  # requests that may wait


@pytest.fixture(scope="session")
def server(compile_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with Launched(compile_cache, tmp_path_factory.mktemp("server"), max_queued_requests=QUEUE) as running:
        yield running
