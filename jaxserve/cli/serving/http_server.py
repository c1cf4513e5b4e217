"""uvicorn with this server's settings, for the main process and for workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from jaxserve.api.http.browser_guard import guarded
from jaxserve.api.http.connection import limited_protocol
from jaxserve.config import ServerSection

KEEP_ALIVE = 75  # seconds; longer than the 60 s of common proxies, so that they close first


def http_config(
    app: FastAPI, section: ServerSection, graceful_shutdown: int = 5, unix_socket: str | None = None
) -> uvicorn.Config:
    """Return uvicorn's settings. graceful_shutdown: seconds that open responses have when it stops

    unix_socket: path of a socket of this machine to serve instead of a port, without TLS
    """
    return uvicorn.Config(
        guarded(app, section) if unix_socket is None else app,
        uds=unix_socket,
        http=limited_protocol(section),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=graceful_shutdown,
        ssl_keyfile=section.ssl_keyfile if unix_socket is None else None,
        ssl_certfile=section.ssl_certfile if unix_socket is None else None,
    )


class Server(uvicorn.Server):
    """uvicorn without signal handlers. The process's main function handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
