"""Refuse requests that a page of another site lets a browser send to a server that needs no API key.

A browser sends requests of any page to any address, and two ways need no permission of the server. First, the page's
own name can be made to resolve to the server's address (DNS rebinding). The Host header then shows that name. Second,
a POST in one of the forms of HTML is sent without a preflight. Origin and Sec-Fetch-Site show its origin. A server
that needs an API key is safe from both, because the page has no key.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.api.http.errors import send_error
from jaxserve.config import ServerSection
from jaxserve.errors import PermissionDeniedError

# No public page has a name below these: RFC 6761, RFC 6762, and ICANN's reservation of .internal, which Docker uses.
_LOCAL_DOMAINS = (".localhost", ".local", ".internal")
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
# the content types that the Fetch standard lets a page send without a preflight
_WITHOUT_PREFLIGHT = frozenset({"", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"})


def guarded(app: ASGIApp, section: ServerSection) -> ASGIApp:
    """Return `app` behind the checks that the configuration section asks for."""
    if section.allowed_hosts == "auto":
        return app if section.needs_key else BrowserGuard(app, section, _local_names(section.host))
    return app if "*" in section.allowed_hosts else BrowserGuard(app, section, section.allowed_hosts)


class BrowserGuard:
    """ASGI middleware that checks the Host header, and the origin if the server needs no API key.

    IP addresses, localhost and names of local domains are always allowed: no page of another site has such a name.
    hosts: the other names that a Host header may have; None: any name
    """

    def __init__(self, app: ASGIApp, section: ServerSection, hosts: tuple[str, ...] | None) -> None:
        self.app = app
        self._hosts = hosts
        self._checks_origins = not section.needs_key and "*" not in section.cors_origins
        self._origins = section.cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                for host in headers.getlist("host"):
                    self._check_host(host)
                if self._checks_origins and scope["method"] not in _WITHOUT_BODY:
                    self._check_origin(headers)
            except PermissionDeniedError as error:
                return await send_error(error, scope, receive, send)
        await self.app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        found = _HOST.fullmatch(host)
        name = (found[1] if found else host).lower().removesuffix(".")
        if self._hosts is None or _is_local(name) or any(_matches(name, each) for each in self._hosts):
            return
        raise PermissionDeniedError(
            f"Requests for the host {host!r} are not served here: server.allowed_hosts lists the names of this server.",
            code="host_not_allowed",
        )

    def _check_origin(self, headers: Headers) -> None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in _WITHOUT_PREFLIGHT or not _is_foreign(headers):
            return
        origin = headers.get("origin", "null")
        if origin not in self._origins:
            raise PermissionDeniedError(
                f"Pages of the origin {origin!r} may not send this: server.cors_origins lists the origins that may.",
                code="origin_not_allowed",
            )


def _is_foreign(headers: Headers) -> bool:
    """Return whether a page of another origin made the browser send the request.

    Browsers send Sec-Fetch-Site to https and to loopback addresses only. It holds behind a proxy that changes Host too.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower()


def _local_names(bound_to: str) -> tuple[str, ...] | None:
    """Return the names of a server that listens on `bound_to`; None (any name) if that is not a loopback address."""
    try:
        address = socket.getaddrinfo(bound_to, None, type=socket.SOCK_STREAM)[0][4][0]
        if not ipaddress.ip_address(address).is_loopback:
            return None
    except (OSError, ValueError):  # it cannot be bound either
        return None
    return bound_to.lower(), socket.gethostname().lower()


def _is_local(name: str) -> bool:
    """Return whether a name is an IP address, is in a local domain, or is empty, as some clients send it."""
    if name in ("", "localhost") or name.endswith(_LOCAL_DOMAINS):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _matches(name: str, allowed: str) -> bool:
    """Return whether a name equals `allowed`, or ends in its domain if `allowed` is like `*.example.com`."""
    return name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed
