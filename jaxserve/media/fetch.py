"""Pictures by URL: fetched from allowed hosts with public addresses only, and from no other place that a URL can name.

A URL of a client must not make the server speak to its own network. So the host must be allowed, its name is looked up
once, a name with an address that is not global is refused, and the connection goes to the very addresses that were
checked, one after the other until one answers. Each redirect is checked as a new URL. No proxy and no cookie is used. A
closed port and a silent host give one message, so that nobody scans ports with it.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from jaxserve.errors import InvalidValueError

SECONDS = 5.0  # of a picture, with its redirects
MAX_REDIRECTS = 3
MAX_URL_CHARS = 4096
_PIECE = 64 * 1024
_ALLOWED = re.compile(r"[\x21-\x5b\x5d-\x7e]+")  # visible ASCII without the backslash, which parsers read differently
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether an address is global, also the IPv4 address inside an IPv6 one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return inner.is_global and not inner.is_multicast
    return found.is_global and not found.is_multicast


@dataclass(frozen=True)
class Fetcher:
    """Fetches the pictures of one server.

    allowed_hosts: names, *.example.com for all below, * for any. is_allowed_address: whether to connect to an address
    """

    allowed_hosts: Sequence[str]
    max_bytes: int
    is_allowed_address: Callable[[str], bool] = is_public
    seconds: float = SECONDS

    def fetch(self, url: str, param: str) -> bytes:
        """Return the bytes behind a URL. Blocks. Raises InvalidValueError that names `param`."""
        deadline = time.monotonic() + self.seconds
        for _ in range(MAX_REDIRECTS + 1):
            parts = self._checked(url, param)
            try:
                found, location = self._get(parts, deadline)
                url = url if location is None else urljoin(url, location)  # a ValueError if it is no URL
            except (OSError, http.client.HTTPException, ValueError):
                raise _failed("The image could not be fetched.", param) from None
            if location is None:
                if len(found) > self.max_bytes:
                    raise _failed(f"The image is larger than {self.max_bytes} bytes.", param)
                return found
        raise _failed(f"The image's URL redirects more than {MAX_REDIRECTS} times.", param)

    def _checked(self, url: str, param: str) -> SplitResult:
        try:
            if len(url) > MAX_URL_CHARS or not _ALLOWED.fullmatch(url):
                raise ValueError
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or "@" in parts.netloc:
                raise ValueError
        except ValueError:
            raise _failed("The image's URL is not valid; it begins with http:// or https://.", param) from None
        if not self._is_allowed(parts.hostname):
            raise _failed("The image's host is not one of media.allowed_hosts.", param)
        return parts

    def _is_allowed(self, host: str) -> bool:
        return any(
            each in ("*", host) or (each.startswith("*.") and host.endswith(each[1:])) for each in self.allowed_hosts
        )

    def _get(self, parts: SplitResult, deadline: float) -> tuple[bytes, str | None]:
        """Return (body, None), at most one byte longer than `max_bytes`, or (b"", the place that a redirect names)."""
        host, secure = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(self._connected(host, port, deadline))
            if secure:
                context = ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
                stack.enter_context(sock)
            stack.enter_context(_cut_at(deadline, sock))
            connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(host, port)))
            connection.sock = sock
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = {"Accept": "image/png, image/jpeg, image/webp, image/gif", "Accept-Encoding": "identity"}
            connection.request("GET", path, headers={"Host": parts.netloc, **headers})
            response = stack.enter_context(contextlib.closing(connection.getresponse()))
            if response.status in (301, 302, 303, 307, 308):
                return b"", response.headers.get("Location", "")
            coded = response.headers.get("Content-Encoding", "identity").lower() != "identity"
            if response.status != 200 or coded:
                raise ValueError(f"status {response.status}")
            return self._body(response, deadline), None

    def _body(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        data = bytearray()
        while len(data) <= self.max_bytes:
            if time.monotonic() > deadline:
                raise TimeoutError
            piece = response.read(min(_PIECE, self.max_bytes + 1 - len(data)))
            if not piece:
                break
            data += piece
        if response.length and len(data) <= self.max_bytes:
            raise ValueError("the body is shorter than its length")
        return bytes(data)

    def _connected(self, host: str, port: int, deadline: float) -> socket.socket:
        """Connect to the first address of a host that answers. All are checked before one is tried."""
        found = _looked_up(host, port, deadline)
        addresses = [(family, place) for family, _, _, _, place in found]
        if not all(self.is_allowed_address(str(place[0])) for _, place in addresses):
            raise ValueError("not a public address")
        refusal = OSError("no address")
        for left in range(len(addresses), 0, -1):
            family, place = addresses[-left]
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                # A share of the time: a silent address, as an IPv6 one without a route, leaves some for the next.
                sock.settimeout(max(0.001, (deadline - time.monotonic()) / left))
                sock.connect(place)
                return sock
            except OSError as error:
                sock.close()
                refusal = error
            except BaseException:
                sock.close()
                raise
        raise refusal


def _looked_up(host: str, port: int, deadline: float) -> list[tuple[Any, ...]]:
    """Return the addresses of a host, as getaddrinfo does. Raises OSError, at the deadline too, and UnicodeError.

    getaddrinfo takes no timeout, and a resolver that is silent holds it for 30 s by default. So it runs in a thread
    that is left behind at the deadline.
    """
    found: Future[list[tuple[Any, ...]]] = Future()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=look_up, name="jaxserve-lookup", daemon=True).start()
    return found.result(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _cut_at(deadline: float, sock: socket.socket) -> Iterator[None]:
    """Cut a connection at the deadline, whatever waits for it: its own timeout begins again with each byte."""

    def cut() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _failed(message: str, param: str) -> InvalidValueError:
    return InvalidValueError(f"{param}: {message}", param=param, code="invalid_image_url")
