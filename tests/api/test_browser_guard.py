"""Pages of other sites: their requests are refused by a server that needs no API key."""

import asyncio
import io
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from jaxserve.api.http.browser_guard import guarded
from jaxserve.config import Config

from .conftest import LiveServer

OWN = ["127.0.0.1:8000", "localhost", "LOCALHOST.:8000", "a.localhost:1", "[::1]:8000", "192.168.0.7", "", "0.0.0.0"]
OWN += ["host.docker.internal:11434", "nas.local", "vm.c.project.internal", "A.LOCAL."]
FOREIGN = [
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil:80:80",
    "local",
    "internal",
    "host.docker.internal.evil.example",
    "evillocal",
    "[evil]",
    "2130706433",
]


def status(server: dict[str, Any], method: str = "GET", **headers: str) -> int:
    """Return the status that a request gets in front of an application that answers all with 200."""
    found: list[int] = []

    async def send(message: Message) -> None:
        found.extend([message["status"]] if message["type"] == "http.response.start" else [])

    async def receive() -> Message:
        return {"type": "http.request"}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    app = guarded(PlainTextResponse("ok"), Config().replace(server=server).server)
    scope: dict[str, Any] = {"type": "http", "method": method, "path": "/v1/files", "headers": raw}

    async def call() -> None:
        await app(scope, receive, send)

    asyncio.run(call())
    return found[0]


@pytest.mark.parametrize("bound_to", ["127.0.0.1", "localhost", "::1"])
def test_other_names_are_refused_on_a_loopback_address(bound_to: str) -> None:
    own = {host: status({"host": bound_to}, host=host) for host in (*OWN, socket.gethostname())}
    assert set(own.values()) == {200}, own
    foreign = {host: status({"host": bound_to}, host=host) for host in FOREIGN}
    assert set(foreign.values()) == {403}, foreign


@pytest.mark.parametrize(
    "server",
    [{"api_key": "k"}, {"keys": [{"name": "a", "value": "k-12345"}]}, {"host": "0.0.0.0"}, {"allowed_hosts": "*"}],
)
def test_any_name_is_served_with_a_key_or_to_a_network(server: dict[str, Any]) -> None:
    assert {status(server, host=host) for host in (*OWN, *FOREIGN)} == {200}


def test_a_list_holds_whatever_the_address_and_the_key() -> None:
    server = {"host": "0.0.0.0", "api_key": "k", "allowed_hosts": ["LLM.lan", "*.example.com"]}
    served = {host: status(server, host=host) for host in ("llm.lan:80", "a.b.example.com", *OWN)}
    assert set(served.values()) == {200}, served
    refused = {
        host: status(server, host=host) for host in ("example.com", "x.lan", "badexample.com", socket.gethostname())
    }
    assert set(refused.values()) == {403}, refused


PAGE = {"host": "127.0.0.1:8000", "content_type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),  # no browser
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({"origin": "https://llm.example.com", "sec_fetch_site": "same-origin"}, 200),  # behind a proxy
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://evil.example", "content_type": "text/plain"}, 403),
        ({"origin": "http://evil.example", "content_type": ""}, 403),
        ({"origin": "http://127.0.0.1:3000", "sec_fetch_site": "same-site"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"origin": "http://page"}, 200),  # in the list
        ({"origin": "http://evil.example", "content_type": "application/json"}, 200),  # the preflight decides
    ],
)
def test_what_a_page_sends_without_a_preflight(headers: dict[str, str], expected: int) -> None:
    for open_to_pages in ({}, {"host": "0.0.0.0"}, {"allowed_hosts": ["llm.lan"]}):
        server = {"cors_origins": ["http://page"], **open_to_pages}
        assert status(server, "POST", **PAGE | headers) == expected
        assert status(server, "GET", **PAGE | headers) == 200
    for closed in ({"api_key": "k"}, {"allowed_hosts": "*"}, {"cors_origins": "*"}):
        assert status(closed, "POST", **PAGE | headers) == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("guard")
    with LiveServer(Config(), store=directory) as server:
        yield server


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}])
def test_no_page_stores_a_file(server: LiveServer, headers: dict[str, str]) -> None:
    upload = {"files": {"file": ("a.jsonl", io.BytesIO(b"{}"))}, "data": {"purpose": "batch"}}
    assert server.http.post("/v1/files", headers=headers, **upload).status_code == 403
    assert server.http.get("/v1/files").json()["data"] == []
    assert server.http.post("/v1/files", **upload).status_code == 200
    server.http.delete(f"/v1/files/{server.http.get('/v1/files').json()['data'][0]['id']}").raise_for_status()


def test_the_refusal_has_the_form_of_the_api_and_names_the_setting(server: LiveServer) -> None:
    foreign = {"host": "evil.example"}
    openai = server.http.get("/v1/models", headers=foreign)
    ollama = server.http.get("/api/tags", headers=foreign).json()["error"]
    anthropic = server.http.post("/v1/messages", headers=foreign).json()["error"]
    assert openai.status_code == 403 and openai.json()["error"]["code"] == "host_not_allowed"
    assert anthropic["type"] == "permission_error"
    for message in (openai.json()["error"]["message"], ollama, anthropic["message"]):
        assert "server.allowed_hosts" in message and "evil.example" in message
