"""A server on a real socket, in a thread, over the fake engine; and the official client."""

import asyncio
import functools
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2
import msgspec
import openai
import pytest
import uvloop

from docgen.errors import entries
from jaxserve.api.app import create_app
from jaxserve.cli.http_server import Server, http_config
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.store import Disk, Store
from jaxserve.types.messages import EngineInfo, Ready
from tests.waiting import LAST_RESORT, until

from .fakes import FakeLink, fake_engine

T = TypeVar("T")


@functools.cache
def indexed() -> set[tuple[int | str | None, ...]]:
    """The errors of docs/errors.md: read from the code at the first error, not when a process collects its tests."""
    return {tuple(entry) for entry in entries()}


def check_indexed(response: httpx2.Response) -> None:
    """An error that a test provokes stands in docs/errors.md."""
    is_json = response.headers.get("content-type", "").startswith("application/json")
    if response.status_code < 400 or not is_json or not response.read():  # HEAD has no body
        return
    body = response.json()
    error = body.get("error")
    in_openai_form = isinstance(error, dict) and "code" in error  # which the index shows
    found = in_openai_form and (response.status_code, error["type"], error["code"])
    assert not found or found in indexed(), f"{found} is not in the index of errors: {body}"


@dataclass
class LiveServer:
    """Starts on entering, stops on leaving. Changes to `link` go through `call`: they belong to the server's loop."""

    config: Config = field(default_factory=Config)
    ready: bool = True
    store: Path | None = None  # with a directory: files and batches
    disk: Disk | None = None  # under the store
    clock: Callable[[], float] = time.time  # of the store

    def __enter__(self) -> Self:
        self._up = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))
        self._thread.start()
        assert self._up.wait(LAST_RESORT)
        hooks = {"response": [check_indexed]}
        self.http = httpx2.Client(base_url=self.url, event_hooks=hooks, timeout=LAST_RESORT)
        secret = self.config.server.api_key
        key = secret.get_secret_value() if secret else "none"
        self.client: Any = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=LAST_RESORT)
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self.http.close()
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(LAST_RESORT)
        self.listener.close()

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        self.engine = self.make_engine()
        await self.engine.start(wait=self.ready)
        store = self.store and Store(self.store, disk=self.disk, clock=self.clock)
        app = create_app(self.engine, self.config, store=store)
        self.app = app
        server = Server(http_config(app, self.config.server, graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[self.listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        self._up.set()
        await self._done.wait()
        server.should_exit = True
        await task
        await self.engine.stop()
        if store is not None:
            await store.close()

    def make_engine(self) -> AsyncEngine:
        link = FakeLink()
        link.ready = self.ready
        engine, self.link = fake_engine(self.config, link)
        return engine

    def call(self, function: Callable[[], T]) -> T:
        """Run on the server's loop and wait for the result."""

        async def call() -> T:
            return function()

        return self.run(call())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LAST_RESORT)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds on the server's loop."""

        asyncio.run_coroutine_threadsafe(until(condition, what), self._loop).result()

    def post(self, path: str, body: Any, **keys: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **keys)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[LiveServer]:
    with LiveServer() as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The common server with the common script; a test that ends leaves no request behind."""
    link = shared_server.link
    script = link.script
    yield shared_server
    shared_server.wait(lambda: not link.running and shared_server.engine.num_live == 0, "requests were left behind")
    link.script, link.delay = script, 0.0
    link.seen.clear()
    link.aborted.clear()


@contextmanager
def serving(server: LiveServer, **changes: Any) -> Iterator[LiveServer]:
    """The server as if its model were another one."""
    info = server.engine.info
    _tell(server, msgspec.structs.replace(info, **changes))
    try:
        yield server
    finally:
        _tell(server, info)


def _tell(server: LiveServer, info: EngineInfo) -> None:
    """Let the engine say what it is."""
    server.call(lambda: server.link.say(Ready(info)))
    server.wait(lambda: server.engine.info == info, "the engine was not heard")


@pytest.fixture
def client(server: LiveServer) -> Any:
    return server.client


def reply_with(server: LiveServer, text: str | list[int]) -> None:
    """Let the engine answer every prompt with this."""
    server.link.script = lambda prompt, params: text


__all__ = ["AsyncEngine", "LiveServer", "reply_with", "serving"]
