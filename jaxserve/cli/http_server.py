"""Run uvicorn with this server's settings, socket and certificate, and handle the signals that end it.

`keep_heap_small` tells the allocator of the process to give back the memory of large bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import datetime
import errno
import logging
import math
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from jaxserve.api.http.browser_guard import guarded
from jaxserve.api.http.connection import limited_protocol
from jaxserve.config import ServerSection
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the kernel queues
REPEATED = 1.0  # seconds within which a second signal is the same one

_LOOPBACK: dict[str, str] = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_BIND_FIXES = {
    errno.EADDRNOTAVAIL: "choose another --host: this machine has no such address",
    errno.EACCES: "choose another --port: one below 1024 needs a permission",
}


@contextlib.contextmanager
def bind(section: ServerSection) -> Iterator[socket.socket]:
    """Open a listening socket. Raises ConfigError if the port or the host cannot be used."""
    try:
        family = socket.getaddrinfo(section.host, section.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: two dots side by side, or a part of over 63 characters
        reason = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise ConfigError(f"cannot use the host {section.host}: {reason}", fix="choose another --host") from None
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


def warn_if_open(section: ServerSection) -> None:
    """Warn if others can reach the server and it has no API key."""
    if section.needs_key:
        return
    if section.host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning("listening on %s without an API key: anyone who can reach it can use it", section.host)
    elif "api_key" in section.model_fields_set:
        logger.warning("server.api_key is null: clients need no key")


def check_certificates(section: ServerSection) -> None:
    """Check the TLS files before the model loads. Raises ConfigError if they cannot be used.

    Warns of a certificate whose dates make clients refuse it.
    """
    if section.ssl_certfile is None:
        if section.ssl_keyfile is not None:
            raise ConfigError("server.ssl_keyfile is set, and server.ssl_certfile is not", fix="set --ssl-certfile")
        return
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), section)
    _warn_of_dates(section.ssl_certfile)


def _warn_of_dates(path: str) -> None:
    """Warn of a certificate that has expired or is not valid yet. The first one in a file is the server's own."""
    from cryptography.x509 import load_pem_x509_certificate  # noqa: PLC0415  # most starts do not need it

    with contextlib.suppress(OSError, ValueError):  # TLS reads file formats that this does not read
        found = load_pem_x509_certificate(Path(path).read_bytes())
        begin = found.not_valid_before_utc
        end = found.not_valid_after_utc
        now = datetime.datetime.now(datetime.UTC)
        if now > end:
            logger.warning("the certificate %s expired on %s: clients refuse it", path, f"{end:%Y-%m-%d at %H:%M} UTC")
        elif now < begin:
            logger.warning(
                "the certificate %s is valid from %s: clients refuse it", path, f"{begin:%Y-%m-%d at %H:%M} UTC"
            )


def _load(context: ssl.SSLContext, section: ServerSection) -> None:
    """Load the certificate into a context. Raises ConfigError."""
    assert section.ssl_certfile is not None
    try:
        context.load_cert_chain(section.ssl_certfile, section.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = " and ".join(filter(None, (section.ssl_certfile, section.ssl_keyfile)))
        raise ConfigError(
            f"the certificate cannot be used ({files}): {error}",
            fix="set --ssl-certfile to a PEM certificate and --ssl-keyfile to its key, without a password",
        ) from error


class Certificate:
    """The certificate of a running server. Its files may be replaced at any time, for example before they expire."""

    def __init__(self, section: ServerSection) -> None:
        self._section = section
        self._seen = self._files()

    def look(self, context: ssl.SSLContext) -> None:
        """If the files have changed, use them for new connections. If they cannot be used, keep the old certificate."""
        if (found := self._files()) == self._seen:
            return
        self._seen = found
        new = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            _load(new, self._section)
        except ConfigError as error:
            logger.error("the old certificate stays in use: %s", error)
            return

        def take(connection: ssl.SSLObject, name: str | None, old: ssl.SSLContext) -> None:
            connection.context = new

        # In the old context, a certificate with another kind of key would be added instead of replacing the old one.
        context.sni_callback = take
        logger.info("new connections have the new certificate of %s", self._section.ssl_certfile)
        _warn_of_dates(str(self._section.ssl_certfile))

    def _files(self) -> list[tuple[int, ...]]:
        """Return the attributes of the files that change when a file is replaced; () for a missing file."""
        found: list[tuple[int, ...]] = []
        for path in filter(None, (self._section.ssl_certfile, self._section.ssl_keyfile)):
            try:
                info = os.stat(path)
            except OSError:
                found.append(())
            else:
                found.append((info.st_mtime_ns, info.st_ino, info.st_size))
        return found


def url_of(listener: socket.socket, section: ServerSection) -> str:
    """Return the server's address for clients of this machine, without a slash at the end."""
    scheme = "https" if section.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    host = str(_LOOPBACK.get(host, host))
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def on_signals(act: Callable[[signal.Signals], None], reload: Callable[[], None] | None = None) -> None:
    """Call `act` at each SIGINT or SIGTERM, and `reload` at each SIGHUP. Call this in the main thread, on the loop.

    A signal within REPEATED seconds of another is the same one, because some supervisors send it to a process and its
    group. SIGHUP is also what a terminal sends when it closes; then `act` is called.
    """
    latest = -math.inf
    had_terminal = _has_terminal()

    def first(number: signal.Signals) -> None:
        nonlocal latest
        if (now := time.monotonic()) - latest >= REPEATED:
            latest = now
            act(number)

    def hang_up() -> None:
        if had_terminal and not _has_terminal():
            first(signal.SIGHUP)
        elif reload is not None:
            reload()
        else:
            logger.warning("SIGHUP: this process reads its configuration at the start only; restart it")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        loop.add_signal_handler(signal.SIGHUP, hang_up)


def _has_terminal() -> bool:
    """Return whether the process has a controlling terminal. One that was closed is none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # names of mallopt(3)
_ARENAS = 2
_MAPPED_BYTES = 1 << 20


def keep_heap_small() -> None:
    """Let the allocator give back the memory of large bodies. Call this before other threads start.

    glibc keeps a heap for each thread. After the first large block is freed, it takes blocks of up to 32 MiB from these
    heaps. After this call, blocks of a megabyte are mapped, and unmapped when they are freed. After 2,000 requests of
    `tests/e2e/test_stretched.py`, 171 MiB of the heaps were free without this call, and 32 MiB with it. Without glibc
    it has no effect.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


CERTIFICATE_INTERVAL = 10  # seconds between two checks whether the certificate's files have changed
KEEP_ALIVE = 75  # seconds; longer than the 60 s of common proxies, so that they close first


def http_config(
    app: FastAPI, section: ServerSection, graceful_shutdown: int = 5, unix_socket: str | None = None
) -> uvicorn.Config:
    """Return uvicorn's settings.

    graceful_shutdown: seconds that open responses have when the server stops
    unix_socket: path of a Unix socket to serve without TLS instead of a port
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


def _says_something(record: logging.LogRecord) -> bool:
    """Leave out uvicorn's error that 0 tasks are cancelled: an idle TLS connection is not one."""
    return not (record.levelno == logging.ERROR and record.msg.startswith("Cancel %s running") and record.args == (0,))


class Server(uvicorn.Server):
    """uvicorn's server without signal handlers, because the process's main function handles signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_says_something)

    def look_at_certificate(self) -> None:
        """Look within a second whether the certificate's files have changed."""
        self.last_notified = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
