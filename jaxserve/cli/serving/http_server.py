"""uvicorn with this server's settings, for the main process and for workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from jaxserve.api.http.browser_guard import guarded
from jaxserve.api.http.connection import limited_protocol
from jaxserve.cli.serving.listening import Certificate
from jaxserve.config import ServerSection

CERTIFICATE_INTERVAL = 10  # seconds between two looks whether the certificate's files have changed
KEEP_ALIVE = 75  # seconds; longer than the 60 s of common proxies, so that they close first


def http_config(
    app: FastAPI, section: ServerSection, graceful_shutdown: int = 5, unix_socket: str | None = None
) -> uvicorn.Config:
    """Return uvicorn's settings. graceful_shutdown: seconds that open responses have when it stops

    unix_socket: path of a socket of this machine to serve instead of a port, without TLS
    """
    uses_tls = section.ssl_certfile is not None and unix_socket is None
    config = uvicorn.Config(
        guarded(app, section) if unix_socket is None else app,
        uds=unix_socket,
        http=limited_protocol(section),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=graceful_shutdown,
        ssl_keyfile=section.ssl_keyfile if uses_tls else None,
        ssl_certfile=section.ssl_certfile if uses_tls else None,
        timeout_notify=CERTIFICATE_INTERVAL,
    )
    if uses_tls:
        certificate = Certificate(section)

        async def look() -> None:
            assert config.ssl is not None
            certificate.look(config.ssl)

        config.callback_notify = look
    return config


class Server(uvicorn.Server):
    """uvicorn without signal handlers. The process's main function handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
