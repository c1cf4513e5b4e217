"""`jaxserve launch`: bind the port, start the engine, serve, drain on SIGTERM, SIGINT or SIGHUP.

The socket listens before the model loads. Until it is loaded, every route but /health, /live and /metrics answers 503.
Exit codes: 0 after a signal, 2 for an error of the operator, 1 for any other end, 130 after a second signal. The last
line printed is the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sqlite3
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI

from jaxserve.api.app import check_files, create_app, warm_up
from jaxserve.api.http.connection import limited_protocol
from jaxserve.cli.progress import StartProgress, show_ready
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import EngineLink
from jaxserve.config import Config, ServerSection, StoreSection
from jaxserve.errors import ConfigError, JaxserveError, UnexpectedEndError
from jaxserve.store import Store
from jaxserve.version import __version__

DEFAULT_STORE = "~/.local/share/jaxserve"
BACKLOG = 2048  # connections that the kernel queues
KEEP_ALIVE = 75  # seconds; longer than the 60 s of common proxies, so that they close first

_LOOPBACK: dict[str, str] = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_BIND_FIXES = {
    errno.EADDRNOTAVAIL: "choose another --host: this machine has no such address",
    errno.EACCES: "choose another --port: one below 1024 needs a permission",
}

logger = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Serve until a signal and return the exit code. Raises ConfigError and UnexpectedEndError."""
    model = config.model.path or "the embedded demo model"
    print(f"jaxserve {__version__} starts with {model}", file=sys.stderr, flush=True)
    with bind(config.server) as listener:
        try:
            return uvloop.run(_serve(config, listener))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while Python ends


async def _serve(config: Config, listener: socket.socket) -> int:
    launch = Launch(config, listener)
    launch.handle_signals()
    return await launch.serve(on_ready=_freeze)


def _freeze() -> None:
    """Exclude start-up objects from garbage collection; scanning them would pause every request for 80 ms."""
    gc.collect()
    gc.freeze()


def warn_if_open(section: ServerSection) -> None:
    """Warn if others can reach the server and it has no API key."""
    if section.needs_key:
        return
    if section.host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning("listening on %s without an API key: anyone who can reach it can use it", section.host)
    elif "api_key" in section.model_fields_set:
        logger.warning("server.api_key is null: clients need no key")


@contextlib.contextmanager
def bind(section: ServerSection) -> Iterator[socket.socket]:
    """Open a listening socket. Raises ConfigError if the port or the host cannot be used."""
    try:
        family = socket.getaddrinfo(section.host, section.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"cannot use the host {section.host}: {error.strerror}", fix="choose another --host"
        ) from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((section.host, section.port))
            listener.listen(BACKLOG)
        except OSError as error:
            where = f"{section.host}:{section.port}"
            fix = _BIND_FIXES.get(error.errno or 0, "choose another --port")
            raise ConfigError(f"cannot listen on {where}: {error.strerror}", fix=fix) from None
        warn_if_open(section)
        yield listener


def open_store(section: StoreSection) -> tuple[Store | None, str]:
    """Open the store; return None and a message for clients if that fails.

    Raises ConfigError if the path was set by the operator.
    """
    if section.path is None:
        return None, "This server runs without a store: store.path is null."
    if isinstance(section.path, Path):
        return Store(section.path), ""
    try:
        return Store(Path(DEFAULT_STORE).expanduser()), ""
    except (JaxserveError, RuntimeError, OSError, sqlite3.Error) as error:  # RuntimeError: a user without a home
        logger.warning("no files and no batches: %s; --store.path DIR gives this server its own directory", error)
        return None, "This server runs without a store: its directory cannot be used. The server's log says why."


def check_certificates(section: ServerSection) -> None:
    """Check the TLS files before the model loads. Raises ConfigError if they cannot be used."""
    if section.ssl_certfile is None:
        if section.ssl_keyfile is not None:
            raise ConfigError("server.ssl_keyfile is set, and server.ssl_certfile is not", fix="set --ssl-certfile")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(section.ssl_certfile, section.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = " and ".join(filter(None, (section.ssl_certfile, section.ssl_keyfile)))
        raise ConfigError(
            f"the certificate cannot be used ({files}): {error}",
            fix="set --ssl-certfile to a PEM certificate and --ssl-keyfile to its key, without a password",
        ) from error


def http_config(app: FastAPI, section: ServerSection, graceful_shutdown: int = 5) -> uvicorn.Config:
    """Return uvicorn's settings. graceful_shutdown: seconds that open responses have when it stops."""
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
    """uvicorn without signal handlers. Launch handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Launch:
    """One run of the server. make_link: makes the connection to the engine; None: to a child process."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        *,
        quiet: bool = False,
        make_link: Callable[[Config], EngineLink] | None = None,
    ) -> None:
        check_certificates(config.server)
        self._quiet = quiet
        self._config = config
        self._listener = listener
        self.engine = AsyncEngine(config, make_link(config) if make_link is not None else None)
        self._store, no_store = open_store(config.store)
        self._stop = asyncio.Event()
        self._signals = 0
        self._app = create_app(self.engine, config, store=self._store, no_store=no_store)
        self._server = Server(http_config(self._app, config.server))

    @property
    def url(self) -> str:
        scheme = "https" if self._config.server.ssl_certfile else "http"
        host, port = self._listener.getsockname()[:2]
        host = str(_LOOPBACK.get(host, host))  # an address that a client can use
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def handle_signals(self) -> None:
        """Drain on the first SIGINT, SIGTERM or SIGHUP and exit on the second. Call in the main thread."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def stop(self) -> None:
        """Drain the requests and end `serve`."""
        self._stop.set()

    async def serve(self, on_ready: Callable[[], None] | None = None) -> int:
        """Serve until `stop` and return the exit code.

        Raises ConfigError if the engine or the application cannot start, UnexpectedEndError for any other end.
        """
        http = asyncio.create_task(self._serve_http())
        await self.engine.start(wait=False)
        watch = asyncio.create_task(self._watch(on_ready))
        drain = asyncio.create_task(self._drain())
        tasks = (watch, http, drain)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if self.engine.status.phase == "dead":  # it died while draining, before `_watch` saw it
                raise self._engine_failure()
            return 0
        finally:
            self._server.should_exit = True
            await self.engine.stop()
            for task in (watch, drain):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._store is not None:
                await self._store.close()

    async def _serve_http(self) -> None:
        """Serve HTTP until the server is asked to exit. Raises ConfigError or UnexpectedEndError for any other end."""
        try:
            await self._server.serve(sockets=[self._listener])
        except SystemExit:  # raised by uvicorn if the application does not start
            error = self._app.state.server.startup_error
            if isinstance(error, ConfigError):
                raise error from None
            reason = "it did not start" if error is None else f"{type(error).__name__}: {error}"
        except Exception as error:
            logger.exception("the HTTP server failed")
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = "it stopped"
        if not self._server.should_exit:
            raise UnexpectedEndError(f"the HTTP server ended: {reason}", fix="see the lines above")

    async def _watch(self, on_ready: Callable[[], None] | None) -> None:
        """Show the start and the ready card. Raises JaxserveError if a file cannot be served or the engine is dead."""
        checked = False
        with contextlib.nullcontext() if self._quiet else StartProgress() as progress:
            while self.engine.status.phase == "loading":
                status = await self.engine.next_status()
                checked = checked or await asyncio.to_thread(check_files, self._app)
                if progress is not None:
                    progress.show(status)
        if self.engine.status.phase == "ready":
            await asyncio.to_thread(check_files, self._app)
            await warm_up(self._app)
            if progress is not None:
                key = self._config.server.needs_key
                show_ready(self.engine.info, self.url, api_key=key, seconds=progress.seconds)
            if on_ready is not None:
                on_ready()
        while self.engine.status.phase != "dead":
            await self.engine.next_status()
        raise self._engine_failure()

    def _engine_failure(self) -> JaxserveError:
        """Return the error for an engine that will not be restarted."""
        return self.engine.failure or UnexpectedEndError(
            f"the engine is dead: {self.engine.status.detail}", fix="see the lines above, then start the server again"
        )

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(130)  # the engine ends too, because its stdin is closed
        running = self.engine.num_live
        what = (
            f"draining: {running} running, at most {self._config.server.drain_timeout:g} s" if running else "stopping"
        )
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"jaxserve: {number.name}: {what}; a second signal ends it at once", file=sys.stderr, flush=True)
        self.stop()

    async def _drain(self) -> None:
        """Wait for `stop`, then for the running requests to end."""
        await self._stop.wait()
        self.engine.drain()
        if not await self.engine.drained(self._config.server.drain_timeout):
            logger.warning("%d requests did not end within the drain timeout", self.engine.num_live)
