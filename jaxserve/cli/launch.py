"""`jaxserve launch`: bind the port, start the engine, serve, drain on SIGTERM.

The socket listens before the model loads: until then every route but /health, /live and /metrics answers 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import uvicorn
import uvloop
from fastapi import FastAPI

from jaxserve.api.app import create_app, warm_up
from jaxserve.api.connection import limited_protocol
from jaxserve.cli.config import dump
from jaxserve.cli.help import launch_help
from jaxserve.cli.progress import StartProgress, show_ready
from jaxserve.cli.settings import load_config
from jaxserve.config import Config, ServerSection
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.link import EngineLink
from jaxserve.errors import ConfigError
from jaxserve.log import configure_logging
from jaxserve.store import SqliteStore

BACKLOG = 2048  # connections the kernel keeps for us
KEEP_ALIVE = 75  # seconds; longer than the 60 s of common proxies, so that they close first

logger = logging.getLogger(__name__)


def run(words: Sequence[str]) -> int:
    if any(word in ("-h", "--help", "--help-all") for word in words):
        print(launch_help(everything="--help-all" in words))
        return 0
    config = load_config(words, os.environ)
    configure_logging(config.logging)
    print(f"jaxserve configuration:\n{dump(config)}", file=sys.stderr, flush=True)
    with bind(config.server) as listener:
        return uvloop.run(_serve(config, listener))


async def _serve(config: Config, listener: socket.socket) -> int:
    launch = Launch(config, listener)
    launch.handle_signals()
    return await launch.serve(on_ready=_freeze)


def _freeze() -> None:
    """What lives now lives on: a full collection of it would hold up every request for 0.08 s."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def bind(section: ServerSection) -> Iterator[socket.socket]:
    """A listening socket for the section. Raises ConfigError when the port is taken or the host is not ours."""
    if section.host not in ("127.0.0.1", "localhost", "::1") and section.api_key is None:
        logger.warning("listening on %s without an API key: anyone who reaches it can use it", section.host)
    try:
        family = socket.getaddrinfo(section.host, section.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot use the host {section.host}: {error.strerror}", fix="set --host") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((section.host, section.port))
            listener.listen(BACKLOG)
        except OSError as error:
            where = f"{section.host}:{section.port}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror}", fix="choose another --port") from None
        yield listener


def http_config(app: FastAPI, section: ServerSection, graceful_shutdown: int = 5) -> uvicorn.Config:
    """How uvicorn serves the application. graceful_shutdown: seconds given to answers when it stops."""
    return uvicorn.Config(
        app,
        http=limited_protocol(section),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=graceful_shutdown,
        ssl_keyfile=section.ssl_keyfile,
        ssl_certfile=section.ssl_certfile,
    )


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: draining is Launch's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Launch:
    """One run of the server. make_link: how its engine is reached; None: in a child process."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        *,
        quiet: bool = False,
        make_link: Callable[[Config], EngineLink] | None = None,
    ) -> None:
        self._quiet = quiet
        self._config = config
        self._listener = listener
        self.engine = AsyncEngine(config, make_link(config) if make_link is not None else None)
        self._store = SqliteStore(config.store.path)
        self._stop = asyncio.Event()
        self._signals = 0
        self._app = create_app(self.engine, config, store=self._store)
        self._server = Server(http_config(self._app, config.server))

    @property
    def url(self) -> str:
        scheme = "https" if self._config.server.ssl_certfile else "http"
        host, port = self._listener.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def handle_signals(self) -> None:
        """Drain on the first SIGINT or SIGTERM, leave at once on the second. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def stop(self) -> None:
        """Drain and end `serve`."""
        self._stop.set()

    async def serve(self, on_ready: Callable[[], None] | None = None) -> int:
        """Serve until `stop` or the engine's end; the exit code. Raises ConfigError if the engine cannot start."""
        http = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        await self.engine.start(wait=False)
        watch = asyncio.create_task(self._watch(on_ready))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((http, watch, stop), return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not self._stop.is_set():
                return watch.result()
            await self._drain()
            return 0
        finally:
            self._server.should_exit = True
            await self.engine.stop()
            for task in (watch, stop):
                task.cancel()
            await asyncio.gather(http, watch, stop, return_exceptions=True)
            await self._store.close()

    async def _watch(self, on_ready: Callable[[], None] | None) -> int:
        """Show the start and the ready card; return only when the engine is dead for good."""
        with contextlib.nullcontext() if self._quiet else StartProgress() as progress:
            while self.engine.status.phase == "loading":
                status = await self.engine.next_status()
                if progress is not None:
                    progress.show(status)
        if self.engine.status.phase == "ready":
            await warm_up(self._app)
            if not self._quiet:
                show_ready(self.engine.info, self.url, api_key=self._config.server.api_key is not None)
            if on_ready is not None:
                on_ready()
        while self.engine.status.phase != "dead":
            await self.engine.next_status()
        if self.engine.failure is not None:
            raise self.engine.failure
        return 1

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(130)  # the second signal: at once; the engine sees its stdin end and follows
        self.stop()

    async def _drain(self) -> None:
        self.engine.drain()
        if not await self.engine.drained(self._config.server.drain_timeout):
            logger.warning("%d requests did not end within the drain timeout", self.engine.num_live)
