"""One real server with the demo model for the whole session: HTTP in a thread, the engine in its own process."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from jaxserve import launch_server
from jaxserve.library.serving import RunningServer
from tests.conftest import SERVED
from tests.e2e.browser import Browser, chromium


@pytest.fixture(scope="session")
def server(compile_cache: str) -> Iterator[RunningServer]:
    with launch_server(compile_cache=compile_cache, **SERVED) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path / "profile") as started:
        yield started
