"""An HTTP parser that ignores the Upgrade header and reads the body after it.

RFC 9110, section 7.8, lets a server ignore Upgrade. httptools stops at the headers of such a request, loses its body
and parses the following bytes as another request. The headers are therefore parsed again without Upgrade.
"""

from __future__ import annotations

from typing import Protocol

import httptools


class ParserCallbacks(Protocol):
    """The parts of a request that the parser's callbacks have collected."""

    url: bytes
    headers: list[tuple[bytes, bytes]]  # names in lower case


class RequestParser:
    """httptools' parser, with the same callbacks.

    While `upgrades` is true, the callbacks run for headers that will be parsed a second time.
    """

    def __init__(self, request: ParserCallbacks) -> None:
        self._request = request
        self._parser = _parser(request)

    @property
    def upgrades(self) -> bool:
        """Return whether the current headers ask for an upgrade. They will be parsed again without it."""
        return self._parser.should_upgrade()

    def feed_data(self, data: bytes) -> None:
        """Parse bytes of the connection. Raises httptools.HttpParserError, also for the method CONNECT."""
        while True:
            try:
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                head = self._head_without_upgrade()
                self._parser = _parser(self._request)
                data = head + data[upgrade.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        method, version = self.get_method(), self.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not served")
        lines = [method + b" " + self._request.url + b" HTTP/" + version]
        for name, value in self._request.headers:
            if name == b"connection":
                value = b", ".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # --- the interface that uvicorn expects of its parser

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Return False: a request for an upgrade is parsed again before uvicorn sees it."""
        return False


def _parser(request: ParserCallbacks) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(request)
    # A client that sent "Connection: close" may have sent more. It is dropped with the connection and is no error.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
