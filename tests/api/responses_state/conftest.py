"""A server that keeps responses in a real SQLite file, and what the tests ask of it through the official client."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.api.conftest import LiveServer
from tests.waiting import wait_until

ENDED = ("completed", "failed", "cancelled", "incomplete")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(store=tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def server(live: LiveServer) -> Iterator[LiveServer]:
    script = live.link.script
    yield live
    live.call(live.link.hold.set)
    live.wait(lambda: not live.link.running and live.engine.num_live == 0, "requests were left behind")
    live.link.script, live.link.delay = script, 0.0
    live.link.seen.clear()


@pytest.fixture
def client(server: LiveServer) -> Any:
    return server.client


def create(client: Any, text: Any, **keys: Any) -> Any:
    return client.responses.create(model="demo", input=text, **keys)


def prompt_of(server: LiveServer) -> str:
    return server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids)


def wait(client: Any, response: Any, *until: str) -> Any:
    def reached() -> bool:
        return client.responses.retrieve(response.id).status in (until or ENDED)

    wait_until(reached, f"{response.id} never reached {until}")
    return client.responses.retrieve(response.id)


def refused(call: Callable[[], Any], status: int, text: str, param: str | None = None, code: Any = ...) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert (caught.value.status_code, caught.value.body["message"]) == (status, text)  # type: ignore[index]
    assert param in (None, caught.value.param) and code in (..., caught.value.code)


def not_found(response_id: str) -> str:
    return f"Response with id '{response_id}' not found."
