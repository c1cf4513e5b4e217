"""One real server with the demo model for the whole session: HTTP in a thread, the engine in its own process."""

from collections.abc import Iterator

import openai
import pytest

from jaxserve import launch_server
from jaxserve.serving import RunningServer


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiled programs shared by the servers and engines of the session."""
    return str(tmp_path_factory.mktemp("xla"))


@pytest.fixture(scope="session")
def server(compile_cache: str) -> Iterator[RunningServer]:
    with launch_server(max_num_seqs=32, max_num_batched_tokens=256, compile_cache=compile_cache) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
