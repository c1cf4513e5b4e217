"""`jaxserve launch`: bind the port, start the engine, serve, drain on SIGTERM or SIGINT, read keys again on SIGHUP.

The socket listens before the model loads. Until it is loaded, every route but /health, /live and /metrics answers 503.
The exit code is 0 after a signal, 2 for an error of the operator, 1 for any other end, and 130 after a second signal.
The last line printed says the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import os
import signal
import socket
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from jaxserve.api.app import check_chat_template, create_app, stop_background, warm_up
from jaxserve.api.encryption import encryption_key
from jaxserve.api.process_group import GroupKeeper
from jaxserve.api.sglang.adapters import kept_adapters
from jaxserve.cli.http_server import Server, bind, check_certificates, http_config, keep_heap_small, on_signals, url_of
from jaxserve.cli.progress import LAST_PHASE, StartProgress, command_began, show_ready
from jaxserve.cli.workers import Workers
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import EngineLink, ProcessLink
from jaxserve.config import DEFAULT_STORE, Config, StoreSection, changed_keys
from jaxserve.errors import ConfigError, JaxserveError, UnexpectedEndError
from jaxserve.log import fields, tell
from jaxserve.store import Store, ThreadLimits
from jaxserve.transport.engine_child import EngineChild

logger = logging.getLogger(__name__)


def serve(config: Config, child: EngineChild | None = None, reread: Callable[[], Config] | None = None) -> int:
    """Serve until a signal and return the exit code. Raises ConfigError and UnexpectedEndError.

    child: the engine process, if it runs already
    reread: reads the configuration again at SIGHUP
    """
    keep_heap_small()
    with bind(config.server) as listener:
        try:
            return uvloop.run(_serve(config, listener, child, reread))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while Python ends


async def _serve(
    config: Config, listener: socket.socket, child: EngineChild | None, reread: Callable[[], Config] | None
) -> int:
    launch = Launch(config, listener, make_link=None if child is None else functools.partial(ProcessLink, child=child))
    launch.handle_signals(reread)
    return await launch.serve(on_ready=freeze)


def freeze() -> None:
    """Exclude start-up objects from garbage collection. Scanning them would pause every request for 80 ms."""
    gc.collect()
    gc.freeze()


def open_store(section: StoreSection) -> tuple[Store | None, str]:
    """Open the store, and return it and "". If that fails, return None and a message for clients.

    Raises ConfigError if the path was set by the operator.
    """
    if section.path is None:
        return None, "This server runs without a store: store.path is null."
    limits = ThreadLimits(math.ceil(section.thread_expiry), section.thread_quota)
    if isinstance(section.path, Path):
        return Store(section.path, thread_limits=limits), ""
    try:
        return Store(Path(DEFAULT_STORE).expanduser(), thread_limits=limits), ""
    except (JaxserveError, RuntimeError, OSError, sqlite3.Error) as error:  # RuntimeError: a user without a home
        logger.warning("no files and no batches: %s; --store.path DIR gives this server its own directory", error)
        return None, "This server runs without a store: its directory cannot be used. The server's log says why."


class Launch:
    """One run of the server.

    make_link: makes the connection to each engine; None: the engines are child processes
    """

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        *,
        quiet: bool = False,
        make_link: Callable[[Config], EngineLink | Sequence[EngineLink]] | None = None,
    ) -> None:
        check_certificates(config.server)
        self._quiet = quiet
        self._config = config
        self._listener = listener
        self.engine = AsyncEngine(config, make_link(config) if make_link is not None else None)
        self._store, no_store = open_store(config.store)
        self._stop = asyncio.Event()
        self._signals = 0
        self._workers = self._make_workers() if config.server.workers > 1 else None
        group = None if self._workers is None else self._workers.group
        self._app = create_app(self.engine, config, store=self._store, no_store=no_store, group=group)
        self._app.state.server.peers = self._workers
        main_socket = None if self._workers is None else self._workers.main_socket
        self._server = Server(http_config(self._app, config.server, unix_socket=main_socket))

    def _make_workers(self) -> Workers:
        key = encryption_key(self._store.directory if self._store is not None else None)
        return Workers(self._config, self.engine, self._listener, key)

    @property
    def url(self) -> str:
        return url_of(self._listener, self._config.server)

    def handle_signals(self, reread: Callable[[], Config] | None = None) -> None:
        """Drain on the first signal and exit on the second. Call this in the main thread.

        reread: reads the configuration again at SIGHUP
        """
        on_signals(self._on_signal, None if reread is None else lambda: self._reload(reread))

    def _reload(self, reread: Callable[[], Config]) -> None:
        """Use the keys and limits of the configuration as it is now. If it is wrong, everything stays as it is."""
        self._server.look_at_certificate()
        old = self._config
        try:
            new = reread()
            self._config = self._app.state.server.reload(new)
        except ConfigError as error:
            return logger.error("SIGHUP: nothing changes: %s", error, extra=fields(event="reload", error=str(error)))
        taken, kept = changed_keys(old, self._config), changed_keys(self._config, new)
        line = f"SIGHUP: changed: {', '.join(taken) or 'nothing'}"
        if kept:
            line += f"; these need a restart: {', '.join(kept)}"
        logger.log(
            logging.WARNING if kept else logging.INFO, line, extra=fields(event="reload", taken=taken, kept=kept)
        )

    def stop(self) -> None:
        """Drain the requests and end `serve`."""
        self._stop.set()

    async def serve(self, on_ready: Callable[[], None] | None = None) -> int:
        """Serve until `stop` and return the exit code.

        Raises ConfigError if the engine or the application cannot start, UnexpectedEndError for any other end.
        """
        self.engine.load_first(await kept_adapters(self._app.state.server))
        http = asyncio.create_task(self._serve_http())
        await self.engine.start(wait=False)
        watch = asyncio.create_task(self._watch(on_ready))
        drain = asyncio.create_task(self._drain())
        workers = () if self._workers is None else (asyncio.create_task(self._workers.run(self._keeper())),)
        tasks = (watch, http, drain, *workers)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if self.engine.status.phase == "dead":  # it died while draining, before `_watch` saw it
                raise self._engine_failure()
            return 0
        finally:
            if self._workers is not None:
                await self._workers.finish()
            await self._stop_engine()
            for task in (watch, drain, *workers):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._workers is not None:
                self._workers.close()
            if self._store is not None:
                await self._store.close()

    async def _stop_engine(self) -> None:
        """End the engine, whose last requests get an error, and all HTTP once the clients have read it."""
        if self._workers is None:
            self._server.should_exit = True
            return await self.engine.stop()
        await self.engine.stop()
        await self._workers.stop()
        self._server.should_exit = True  # until now it served the requests that the workers forwarded

    def _keeper(self) -> GroupKeeper:
        """Return the keeper of the workers' limits in this process."""
        state = self._app.state.server
        return GroupKeeper(
            state.group, lambda: self.engine.load, lambda: state.key_usages.all() if self.engine.was_ready else []
        )

    async def _serve_http(self) -> None:
        """Serve HTTP until the server must exit. Raises ConfigError or UnexpectedEndError for any other end."""
        try:
            await self._server.serve(sockets=[self._listener] if self._workers is None else None)
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
        with contextlib.nullcontext() if self._quiet else StartProgress(began=command_began()) as progress:
            while self.engine.status.phase == "loading":
                status = await self.engine.next_status()
                checked = checked or await asyncio.to_thread(check_chat_template, self._app)
                if progress is not None:
                    progress.show(status)
        if self.engine.status.phase == "ready":
            await asyncio.to_thread(check_chat_template, self._app)
            await warm_up(self._app)
            if self._workers is not None:
                await self._workers.prepare()
            if progress is not None:
                key = self._config.server.needs_key
                progress.add(LAST_PHASE)
                show_ready(self.engine.info, self.url, api_key=key, progress=progress)
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
            line = f"{number.name}: {what}; a second signal ends it at once"
            tell(line, event="drain", signal=number.name, running=running)
        self.stop()

    async def _drain(self) -> None:
        """Wait for `stop`, then for the running requests to end."""
        await self._stop.wait()
        self.engine.drain()
        state = self._app.state.server  # some requests need the engine again, or their clients have not read all
        if not await self.engine.drained(self._config.server.drain_timeout, lambda: state.num_running):
            count = max(self.engine.num_live, state.num_running)
            logger.warning("%d requests did not end within the drain timeout", count)
            await stop_background(self._app)  # before the end of the engine makes them fail
