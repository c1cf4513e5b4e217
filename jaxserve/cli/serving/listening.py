"""The listening socket of a server, its certificate, its address, and the signals that end it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator

from jaxserve.config import ServerSection
from jaxserve.errors import ConfigError

BACKLOG = 2048  # connections that the kernel queues

_LOOPBACK: dict[str, str] = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_BIND_FIXES = {
    errno.EADDRNOTAVAIL: "choose another --host: this machine has no such address",
    errno.EACCES: "choose another --port: one below 1024 needs a permission",
}

logger = logging.getLogger(__name__)


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


def url_of(listener: socket.socket, section: ServerSection) -> str:
    """Return the server's address for clients of this machine, without a slash at the end."""
    scheme = "https" if section.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    host = str(_LOOPBACK.get(host, host))
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def on_signals(act: Callable[[signal.Signals], None]) -> None:
    """Call `act` at each SIGINT, SIGTERM or SIGHUP. Call in the main thread, on the event loop."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, act, number)
